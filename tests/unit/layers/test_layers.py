from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import TaskError
from raytrain_plus.layers import (
    Attention,
    Block,
    FeedForward,
    Head,
    adapted_plan,
    cross_entropy,
    rotated,
    transformer_plan,
)
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slicing import CutLayers, Slicing, cut_layers
from raytrain_plus.trial.footprint import kept_bytes
from tests.unit.parallel.tensor.hosting import check_bits, gradients_of, hosted, in_sequence, noted, whole

WIDTH, HEADS, WORDS = 64, 4, 48
PLAN = transformer_plan(embed="embed", blocks="block*", head="head")
DIVIDED = transformer_plan(embed="embed", blocks="block*", head="head", sequence=True)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "embed": nn.Embedding(WORDS, WIDTH),
        "block0": Block(WIDTH, HEADS, hidden=256, bias=True, dropout=0.3),
        "block1": Block(WIDTH, HEADS, kv_heads=4, hidden=256),
        "head": Head(WIDTH, WORDS),
    }


def cut(slices: int, link: Link | None = None, plan: Mapping[str, str] = PLAN) -> CutLayers:
    return CutLayers(*cut_layers(layers(), Slicing(plan, slices, link or Link())))


TEXT = torch.randint(0, WORDS, (3, 9), generator=torch.Generator().manual_seed(1))
LABELS = TEXT[:, 1:].clone()
LABELS[0, :3] = -100


def passed(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    loss = cross_entropy(model(TEXT[:, :-1]), LABELS)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize("plan", [PLAN, DIVIDED])
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_compute_loss_and_gradients_of_the_whole_model(slices: int, plan: Mapping[str, str]) -> None:
    loss, gradients = passed(in_sequence(layers()))
    model = cut(slices, plan=plan)
    cut_loss, cut_gradients = passed(model)
    torch.testing.assert_close(cut_loss, loss, rtol=1e-6, atol=1e-6)
    joined = whole(cut_gradients, model)
    assert joined.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(joined[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("plan", [PLAN, DIVIDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_who_hosts_the_slices(dtype: torch.dtype, plan: Mapping[str, str]) -> None:
    check_bits(lambda link: passed(cut(4, link, plan).to(dtype)))


def test_a_block_whose_positions_are_divided_gathers_twice_and_sums_twice_in_each_direction() -> None:
    found = layers()["block1"]

    def each(link: Link) -> list[tuple[int, ...]]:
        shapes = noted(link)
        x = torch.ones(3, 8 // link.ranks, WIDTH, requires_grad=True)
        made = CutLayers(*cut_layers({"block1": copy.deepcopy(found)}, Slicing(DIVIDED, 2, link)))
        made(x).sum().backward()
        return shapes

    shapes, other = hosted(2, each)
    assert shapes == other
    # One worker sends its four of eight positions each time; the weights of the two norms are summed beside.
    assert shapes.count((1, 3, 4, WIDTH)) == 4 + 4
    assert [shape for shape in shapes if shape != (1, 3, 4, WIDTH)] == [(WIDTH,), (WIDTH,)]


def test_a_worker_keeps_less_for_the_backward_pass_if_positions_are_divided() -> None:
    def kept(plan: Mapping[str, str]) -> int:
        def each(link: Link) -> int:
            return kept_bytes(lambda: cut(4, link, plan)(TEXT[:, :-1]))

        return max(hosted(4, each))

    whole_input = 3 * 8 * WIDTH * 4
    # Each of five norms keeps at least its input, of which a worker has a quarter.
    assert kept(PLAN) - kept(DIVIDED) >= 5 * whole_input * 3 // 4


def test_rows_of_a_length_that_slices_do_not_divide_are_refused() -> None:
    with pytest.raises(
        TaskError, match=r"(?s)9 positions cannot be divided between 4 slices.*write them with length 8"
    ):
        cut(4, plan=DIVIDED)(TEXT)


def test_weights_that_would_see_some_positions_only_are_refused() -> None:
    plan = {name: word for name, word in DIVIDED.items() if name != "block*.norm2"}
    with pytest.raises(TaskError, match=r"'block0.norm2.weight' would see some of them only"):
        cut(2, plan=plan)


def test_the_layers_of_transformers_are_cut_by_their_own_plan() -> None:
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1
    )
    config._attn_implementation = "sdpa"

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layer = llama.LlamaRotaryEmbedding(config), llama.LlamaDecoderLayer(config, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at = torch.arange(8)[None]
            found: torch.Tensor = self.layer(x, position_embeddings=self.positions(x, at), position_ids=at)
            return found

    def decoder() -> dict[str, nn.Module]:
        torch.manual_seed(0)
        return {"block0": Decoder()}

    x = torch.randn(2, 8, WIDTH)
    plan = adapted_plan(config.base_model_tp_plan, "block*.layer")

    def sliced(link: Link) -> torch.Tensor:
        found: torch.Tensor = CutLayers(*cut_layers(decoder(), Slicing(plan, 4, link)))(x)
        return found

    together = sliced(Link())
    expected = decoder()["block0"](x)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(one, together) for one in hosted(4, sliced))

    norms = dict.fromkeys(
        ("block*.layer.input_layernorm", "block*.layer.post_attention_layernorm"), "sequence_parallel"
    )

    def divided(link: Link) -> torch.Tensor:
        own = x.chunk(link.ranks, 1)[link.rank]
        found: torch.Tensor = CutLayers(*cut_layers(decoder(), Slicing({**plan, **norms}, 4, link)))(own)
        return found

    torch.testing.assert_close(divided(Link()), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat(hosted(4, divided), 1), divided(Link()))


def test_no_host_has_the_scores_of_all_tokens_but_in_evaluations() -> None:
    assert hosted(4, lambda link: cut(4, link)(TEXT).shape) == [(3, 9, WORDS // 4)] * 4

    def evaluated(link: Link) -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = cut(4, link)(TEXT)
        return scores

    expected = evaluated(Link())
    assert expected.shape == (3, 9, WORDS)
    assert all(torch.equal(found, expected) for found in hosted(4, evaluated))


@pytest.mark.parametrize("wrong", [-1, WORDS])
def test_what_is_no_token_is_an_error_as_without_slices(wrong: int) -> None:
    labels, text = LABELS.clone(), TEXT.clone()
    labels[1, 2] = text[1, 2] = wrong
    for slices in (2, 4):
        with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
            cross_entropy(cut(slices)(TEXT[:, :-1]), labels)
        with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
            cut(slices)(text)


def test_without_slices_the_loss_is_torch_s() -> None:
    scores = torch.randn(3, 8, WORDS)
    expected = F.cross_entropy(scores.reshape(-1, WORDS), LABELS.reshape(-1))
    assert torch.equal(cross_entropy(scores, LABELS), expected)
    assert torch.equal(cross_entropy(scores.reshape(-1, WORDS), LABELS.reshape(-1)), expected)


def test_heads_may_share_keys_and_values() -> None:
    torch.manual_seed(0)
    shared, plain = Attention(WIDTH, HEADS, kv_heads=2), Attention(WIDTH, HEADS)
    plain.load_state_dict(
        shared.state_dict()
        | {
            f"{name}.weight": getattr(shared, name)
            .weight.unflatten(0, (2, 1, -1))
            .expand(2, 2, -1, WIDTH)
            .flatten(0, 2)
            for name in ("k", "v")
        }
    )
    x = torch.randn(2, 7, WIDTH)
    torch.testing.assert_close(shared(x), plain(x))


def test_positions_are_relative() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(16), torch.randn(16)
    both = [rotated(one.expand(1, 1, 12, 16))[0, 0] for one in (q, k)]
    scores = both[0] @ both[1].T
    torch.testing.assert_close(scores[3, 1], scores[9, 7])
    assert not torch.allclose(scores[3, 1], scores[3, 2])


def test_what_comes_later_changes_nothing_before() -> None:
    block: Callable[[torch.Tensor], torch.Tensor] = Block(WIDTH, HEADS, gated=False)
    x = torch.randn(1, 6, WIDTH)
    other = torch.cat([x[:, :4], torch.randn(1, 2, WIDTH)], 1)
    torch.testing.assert_close(block(x)[:, :4], block(other)[:, :4])


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(64, 5, 5), (64, 4, 3), (12, 4, 4)])
def test_numbers_that_do_not_divide_are_refused(width: int, heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match="do not divide each other"):
        Attention(width, heads, kv_heads)


def test_a_network_without_a_gate_has_two_weights() -> None:
    assert [name for name, _ in FeedForward(8, 16, gated=False).named_parameters()] == ["up.weight", "down.weight"]
