from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import TaskError
from raytrain_plus.membership.mesh import rank_counts
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slice_plan import cuts_of
from raytrain_plus.parallel.tensor.slicing import (
    CutLayers,
    Slicing,
    cut_layers,
    module_names,
    tied_slices,
)
from tests.unit.parallel.tensor.hosting import check_bits, gradients_of, hosted, in_sequence, noted, whole

WIDTH, HEADS, HIDDEN, VOCABULARY = 32, 4, 256, 24
PLAN = {
    "embed": "vocab",
    "block*.qkv": "colwise",
    "block*.mix": "rowwise",
    "block*.mlp.gate": "colwise",
    "block*.mlp.up": "colwise",
    "block*.mlp.down": "rowwise",
    "head": "colwise",
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return fed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(rows, length, -1))
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(5)
    return {
        "embed": nn.Embedding(VOCABULARY, WIDTH, padding_idx=13),
        "block0": Block(),
        "block1": Block(),
        "head": nn.Linear(WIDTH, VOCABULARY),
    }


def cut(slices: int, link: Link | None = None, plan: Mapping[str, str] = PLAN) -> CutLayers:
    return CutLayers(*cut_layers(layers(), Slicing(plan, slices, link or Link())))


BATCH = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))


def passed(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of a model, and the gradients of its parameters by name."""
    output = model(BATCH)
    (output.float() * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return output.detach(), gradients_of(model)


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_compute_what_the_whole_model_does(slices: int) -> None:
    output, gradients = passed(in_sequence(layers()))
    model = cut(slices)
    cut_output, cut_gradients = passed(model)
    torch.testing.assert_close(cut_output, output, rtol=1e-5, atol=1e-6)
    joined = whole(cut_gradients, model)
    assert joined.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(joined[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_weights_of_slices_together_are_the_initial_ones() -> None:
    made, expected = cut(4), dict(in_sequence(layers()).named_parameters())
    joined = whole(dict(made.named_parameters()), made)
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_who_hosts_the_slices(dtype: torch.dtype) -> None:
    check_bits(lambda link: passed(cut(4, link).to(dtype)))


def test_each_host_has_its_slices_and_all_have_the_rest() -> None:
    all_values = sum(value.numel() for module in layers().values() for value in module.parameters())
    uncut = sum(value.numel() for name, value in cut(4).named_parameters() if "@" not in name)
    for ranks in rank_counts(4):
        for rank in range(ranks):
            names = dict(cut(4, Link(rank, ranks, lambda own, other: own)).named_parameters())
            assert sum(value.numel() for value in names.values()) == uncut + (all_values - uncut) // ranks


def exchanges(plan: Mapping[str, str]) -> int:
    """How often one of two hosts exchanges something with the other in a step."""

    def each(link: Link) -> int:
        shapes = noted(link)
        passed(cut(2, link, plan))
        return len(shapes)

    first, second = hosted(2, each)
    assert first == second
    return first


def test_a_block_sums_twice_in_each_direction() -> None:
    # The first block's input needs a gradient, as the embedding's output.
    assert exchanges({key: word for key, word in PLAN.items() if key.startswith("block")}) == 2 * (2 + 2)


def test_projections_that_get_the_same_input_sum_its_gradient_once() -> None:
    assert exchanges({"block1.mlp.gate": "colwise", "block1.mlp.up": "colwise", "block1.mlp.down": "rowwise"}) == 1 + 1


def test_a_copy_of_a_model_computes_with_its_own_slices() -> None:
    made = cut(2)
    copied = copy.deepcopy(made)
    with torch.no_grad():
        for value in made.parameters():
            value.zero_()
    assert torch.equal(passed(copied)[0], passed(cut(2))[0])


def test_the_error_of_a_host_is_raised_and_nobody_waits_for_it() -> None:
    class Fixed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.qkv(self.mix(self.qkv(x)[..., :8])).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
            return found

    def each(link: Link) -> torch.Tensor:
        plan = Slicing({"block0.qkv": "colwise", "block0.mix": "rowwise"}, 4, link)
        found: torch.Tensor = CutLayers(*cut_layers({"block0": Fixed()}, plan))(torch.zeros(3, 7, WIDTH))
        return found

    with pytest.raises(RuntimeError, match="shape"):
        hosted(4, each)


def test_tied_weights_are_tied_slice_by_slice() -> None:
    tied = {"head.weight": "embed.weight"}
    both = Slicing({"embed": "vocab", "head": "colwise"}, 2)
    assert tied_slices(tied, both, nn.Sequential()) == {
        "head@0.weight": "embed@0.weight",
        "head@1.weight": "embed@1.weight",
    }
    assert tied_slices(tied, Slicing({}, 2), nn.Sequential()) == tied
    with pytest.raises(TaskError, match="does not cut both alike"):
        tied_slices(tied, Slicing({"head": "colwise"}, 2), nn.Sequential())


@pytest.mark.parametrize(
    ("plan", "slices", "what"),
    [
        ({"block*.kqv": "colwise"}, 2, r"no layer of the model is called 'block*.kqv'.*did you mean 'block1.qkv'?"),
        ({"head": "columns"}, 2, "the plan cuts 'head' by 'columns'.*one of colwise"),
        ({"head": "colwise", "hea*": "vocab"}, 2, "cuts 'head' both by 'colwise' and by 'vocab'"),
        ({"block0.norm1": "colwise"}, 2, "'block0.norm1' is a LayerNorm, which cannot be cut colwise"),
        ({"head": "vocab"}, 2, "'head' is a Linear, which cannot be cut vocab"),
        ({"block0.mix": "rowwise"}, 2, "cuts 'block0.mix' rowwise, but nothing beside it colwise"),
        ({"head": "colwise"}, 16, "'head' has 24 outputs, which 16 slices do not divide.*take 'head' out"),
        ({"block0.qkv": "colwise"}, 64, "'block0.qkv' has 32 outputs in each of 3 fused projections, which 64 slices"),
        ({"embed": "vocab"}, 16, "'embed' has 24 rows, which 16 slices do not divide"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(plan: dict[str, str], slices: int, what: str) -> None:
    def made() -> None:
        cuts_of(plan, module_names(layers()))
        cut(slices, plan=plan)

    with pytest.raises(TaskError) as refused:
        made()
    parts = what.split(".*")
    assert all(part.replace("\\", "") in str(refused.value) for part in parts), refused.value


def test_a_weight_that_is_used_twice_is_refused() -> None:
    block = Block()
    block.mlp.up.weight = block.mlp.gate.weight
    plan = {"block0.mlp.up": "colwise", "block0.mlp.down": "rowwise"}
    with pytest.raises(TaskError, match=re.escape("'block0.mlp.up.weight' is the same parameter as")):
        cut_layers({"block0": block}, Slicing(plan, 2))


def test_what_slices_would_lose_is_refused() -> None:
    normed = {"up": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))}
    with pytest.raises(TaskError, match=r"'up' has .*parametrizations"):
        cut_layers(normed, Slicing({"up": "colwise"}, 2))
    hooked = {"up": nn.Linear(8, 8)}
    hooked["up"].register_forward_hook(lambda *_: None)
    with pytest.raises(TaskError, match="'up' has hooks, which slices would not have"):
        cut_layers(hooked, Slicing({"up": "colwise"}, 2))


def test_the_bias_of_rows_is_tied_as_it_is() -> None:
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    tied = {"b.down.bias": "a.down.bias", "b.down.weight": "a.down.weight"}
    assert tied_slices(tied, Slicing(plan, 2), nn.Sequential()) == {
        "b.down.bias": "a.down.bias",
        "b@0.down.weight": "a@0.down.weight",
        "b@1.down.weight": "a@1.down.weight",
    }


def test_some_layers_can_be_cut_by_a_plan_for_all() -> None:
    found, units = cut_layers({"head": layers()["head"]}, Slicing(PLAN, 2))
    assert (set(found), set(units)) == ({"head"}, {"head@0", "head@1"})
