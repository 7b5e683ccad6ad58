from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import TaskError
from raytrain_plus.layers import Block, Experts, FeedForward, transformer_plan
from raytrain_plus.layers.expert_networks import ExpertNetworks, grouped_product, sorted_places
from raytrain_plus.layers.router import ENTROPY_UNIT, Router, within
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slice_plan import words_for
from raytrain_plus.parallel.tensor.slicing import CutLayers, Slicing, cut_layers, tied_slices
from raytrain_plus.torch_compat import DEAR_OPERATIONS, counting_operations
from tests.unit.parallel.tensor.hosting import check_bits, gradients_of, hosted, in_sequence, whole

WIDTH, HIDDEN, COUNT = 16, 32, 8
X = torch.randn(3, 11, WIDTH, generator=torch.Generator().manual_seed(1))


def experts(**options: Any) -> Experts:
    torch.manual_seed(3)
    return Experts(WIDTH, HIDDEN, COUNT, **options)


def dense(model: Experts, x: torch.Tensor) -> torch.Tensor:
    """All experts compute all tokens; those that a token does not use get the weight 0."""
    tokens, networks = x.reshape(-1, WIDTH), model.networks
    logits = tokens @ model.router.weight.T
    scores = logits.sigmoid() if model.router.raised is not None else logits.softmax(-1)
    weights, index = scores.topk(model.router.top_k, -1)
    if model.router.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    shares = torch.zeros_like(scores).scatter(1, index, weights)
    up = torch.einsum("tw,ewh->teh", tokens, networks.up)
    inner = F.gelu(up)
    if networks.gate is not None:
        inner = F.silu(torch.einsum("tw,ewh->teh", tokens, networks.gate)) * up
    found = torch.einsum("teh,ehw,te->tw", inner, networks.down, shares)
    return (found if model.shared is None else found + model.shared(tokens)).view(x.shape)


def passed(model: nn.Module, x: torch.Tensor = X) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    x = x.clone().requires_grad_()
    found = model(x)
    (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
    assert x.grad is not None
    return found.detach(), {"x": x.grad, **gradients_of(model)}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 3, "shared": 2},
        {"top_k": 1, "balance": "none", "gated": False},
        {"top_k": 2, "balance": "none"},
    ],
    ids=str,
)
def test_the_sparse_network_equals_the_dense_formula(options: Mapping[str, Any]) -> None:
    model = experts(**options).double()
    output, gradients = passed(model, X.double())
    model.zero_grad()
    other = X.double().clone().requires_grad_()
    # The router itself computes in float32.
    expected = dense(model, other)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    (expected * torch.linspace(-1, 1, expected.numel()).view(expected.shape)).sum().backward()
    found = {"x": other.grad, **gradients_of(model)}
    assert found.keys() == gradients.keys()
    for name, value in found.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-6, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 6), st.data(), st.sampled_from([0.3, 0.5, 1.0, 1.25, 6.0]), st.integers(0, 9999)
)
def test_each_choice_is_computed_or_counted_as_dropped(
    tokens: int, count: int, data: st.DataObject, capacity: float, seed: int
) -> None:
    top_k = data.draw(st.integers(1, count))
    torch.manual_seed(seed)
    router = Router(4, count, top_k, capacity=capacity, balance="none")
    routing = router(torch.randn(tokens, 4))
    index, weights = routing.experts, routing.weights
    load, (dropped, seen, entropy) = router.tally[:count], router.tally[count:].tolist()
    kept = torch.bincount(index.reshape(-1), minlength=count + 1)
    assert int(load.sum()) == tokens * top_k == int(kept.sum())
    assert seen == tokens
    room = router._room(tokens)
    assert dropped == int(kept[count]) == int((load - room).clamp(min=0).sum())
    assert kept[:count].tolist() == load.clamp(max=room).tolist()
    assert 0 <= entropy * ENTROPY_UNIT <= tokens * (torch.tensor(count).log().item() + 1e-5)
    assert weights.shape == index.shape == (tokens, top_k)
    places, offsets = sorted_places(index, count)
    assert sorted(places.tolist()) == (index.reshape(-1) < count).nonzero().reshape(-1).tolist()
    assert int(offsets[-1]) == int(kept[:count].sum())
    computed = ExpertNetworks(4, 8, count)(torch.randn(tokens, 4), index, weights)
    assert computed.shape == (tokens, 4)


def test_first_choices_and_earlier_tokens_have_priority() -> None:
    index = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 2]])
    assert within(index, 3, 2).tolist() == [[0, 1], [1, 3], [0, 3], [3, 2]]


def test_a_dropped_token_adds_nothing_and_evaluations_drop_none() -> None:
    model = experts(top_k=1, capacity=0.25)
    found = model(X).view(-1, WIDTH)
    dropped = int(model.router.tally[COUNT])
    assert dropped > 0
    assert int((found == 0).all(1).sum()) == dropped
    before = model.router.tally.clone()
    assert int((model.eval()(X).view(-1, WIDTH) == 0).all(1).sum()) == 0
    assert torch.equal(model.router.tally, before)


def test_groups_have_the_same_bits_alone_and_in_a_loop() -> None:
    rows, weights = torch.randn(50, WIDTH), torch.randn(4, WIDTH, HIDDEN)
    offsets = torch.tensor([7, 7, 31, 50], dtype=torch.int32)
    found = grouped_product(rows, weights, offsets)
    looped = torch.cat([rows[a:b] @ one for a, b, one in zip((0, 7, 7, 31), (7, 7, 31, 50), weights, strict=True)])
    assert torch.equal(found, looped)
    assert torch.equal(found[:7], grouped_product(rows[:7], weights[:2], offsets[:2]))
    odd = grouped_product(rows[:, :3], weights[:, :3, :5], offsets)
    torch.testing.assert_close(odd[31:], rows[31:, :3] @ weights[3, :3, :5])
    assert grouped_product(rows[:0], weights, offsets * 0).shape == (0, HIDDEN)


def layers(**options: Any) -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "block0": Block(WIDTH, 4, feed_forward=Experts(WIDTH, HIDDEN, COUNT, **options)),
        "block1": Experts(WIDTH, HIDDEN, COUNT, top_k=1),
    }


PLAN = transformer_plan(blocks="block0", experts=True)
SETTINGS: list[Mapping[str, Any]] = [
    {"top_k": 1, "capacity": 1.0},
    {"top_k": 2, "balance": "loss", "z_loss": 1e-3, "shared": 1},
    {"top_k": 3, "jitter": 0.1},
]


@pytest.mark.parametrize("plan", [{}, PLAN], ids=["experts", "experts and heads"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_bits_do_not_depend_on_who_hosts_the_experts(options: Mapping[str, Any], plan: Mapping[str, str]) -> None:
    check_bits(lambda link: passed(CutLayers(*cut_layers(layers(**options), Slicing(plan, 4, link, experts=True)))))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_slices_of_experts_compute_what_the_whole_network_does(options: Mapping[str, Any]) -> None:
    output, gradients = passed(in_sequence(layers(**options)))
    cut = CutLayers(*cut_layers(layers(**options), Slicing({}, 4, experts=True)))
    found, own = passed(cut)
    torch.testing.assert_close(found, output, rtol=1e-6, atol=1e-6)
    joined = whole({name: value for name, value in own.items() if name != "x"}, cut)
    assert joined.keys() | {"x"} == gradients.keys()
    for name, value in joined.items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-5, atol=1e-6, msg=name)
    held = {name for name, _ in cut.named_parameters() if name.startswith("block1@")}
    assert held == {f"block1@{number}.networks.{name}" for number in range(4) for name in ("gate", "up", "down")}


def test_a_host_of_one_slice_holds_a_quarter_of_the_experts() -> None:
    def each(link: Link) -> int:
        cut = CutLayers(*cut_layers(layers(), Slicing({}, 4, link, experts=True)))
        return sum(value.numel() for name, value in cut.named_parameters() if name.startswith("block1"))

    whole_network = 3 * COUNT * WIDTH * HIDDEN
    assert hosted(4, each) == [whole_network // 4 + COUNT * WIDTH] * 4


def test_lower_precisions_route_in_float32() -> None:
    model = experts(top_k=2)
    expected = model.router(X.view(-1, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(X)
        routing = model.router(X.view(-1, WIDTH))
    assert torch.equal(routing.experts, expected.experts)
    assert torch.equal(routing.weights, expected.weights)
    torch.testing.assert_close(found.float(), model(X), rtol=0.05, atol=0.02)
    halved = experts(top_k=2).to(torch.bfloat16)
    output, gradients = passed(halved, X.bfloat16())
    assert output.dtype == gradients["networks.up"].dtype == torch.bfloat16


@pytest.mark.parametrize(("top_k", "even_from"), [(1, 214), (2, 236)])
def test_the_bias_balances_a_skewed_router(top_k: int, even_from: int) -> None:
    """Sigmoid scores of normal logits with offsets of 1.5 to -1.5: loads even out as computed with NumPy alone."""
    skew = np.linspace(1.5, -1.5, 8)
    violation: dict[str, list[float]] = {}
    for balance in ("bias", "none"):
        generator = np.random.default_rng(0)
        router = Router(8, 8, top_k, balance=balance)  # type: ignore[arg-type]
        router.weight.data.copy_(torch.eye(8))
        violation[balance] = []
        for _ in range(even_from + 20):
            router(torch.from_numpy(generator.normal(size=(512, 8)) + skew).float())
            router.end_step()
            load = router.routed[:8].double()
            violation[balance].append(float((load.max() - load.mean()) / load.mean()))
    means = {balance: np.convolve(seen, np.full(20, 1 / 20), "valid") for balance, seen in violation.items()}
    assert int(np.argmax(means["bias"] < 0.25)) == even_from
    assert min(means["none"]) > 1


def test_a_router_in_bfloat16_goes_on_balancing() -> None:
    """Steps of a thousandth would vanish beside a bias of a half."""
    router = Router(8, 2, 1).bfloat16()
    for _ in range(700):
        router.tally[:2] = torch.tensor([3, 1])
        router.end_step()
    assert router.raised is not None
    assert router.raised.tolist() == [-700, 700]
    router.weight.requires_grad_(False)
    router.tally[:2] = torch.tensor([3, 1])
    router.end_step()
    assert router.raised.tolist() == [-700, 700]


def test_tied_experts_stay_tied_when_they_are_divided() -> None:
    made = {"a": Experts(WIDTH, HIDDEN, 4), "b": Experts(WIDTH, HIDDEN, 4)}
    slicing = Slicing({}, 2, experts=True)
    cut = CutLayers(*cut_layers(made, slicing))
    tied = {"b.networks.up": "a.networks.up", "b.router.weight": "a.router.weight"}
    assert tied_slices(tied, slicing, cut) == {
        "b@0.networks.up": "a@0.networks.up",
        "b@1.networks.up": "a@1.networks.up",
        "b.router.weight": "a.router.weight",
    }


def test_products_of_experts_are_counted_and_kept_as_others_are() -> None:
    model = experts(top_k=1)
    with counting_operations() as count:
        passed(model)
    tokens = X.numel() // WIDTH
    of_networks, of_router = 3 * 3 * 2 * tokens * WIDTH * HIDDEN, 3 * 2 * tokens * WIDTH * COUNT
    assert count() == of_networks + of_router
    assert torch.ops.aten._grouped_mm.default in DEAR_OPERATIONS


def test_compiled_experts_compute_the_same() -> None:
    model = experts(top_k=2)
    expected, _ = passed(model)
    found, gradients = passed(torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(found, expected)
    assert any(name.endswith("networks.up") for name in gradients)


def test_a_plan_with_a_misspelt_word_is_refused() -> None:
    with pytest.raises(TaskError, match=r"the plan cuts '\*\.moe' by 'expert'"):
        words_for({"*.moe": "expert"}, tensor=False, experts=True)


def test_auxiliary_losses_are_backpropagated_with_the_factor_of_the_step() -> None:
    router = Router(WIDTH, COUNT, 2, balance="loss", balance_rate=0.3, z_loss=0.2)
    router.begin_step(8.0)
    tokens = X.view(-1, WIDTH)
    index, weights = (routing := router(tokens)).experts, routing.weights
    (weights * 0).sum().backward()
    found = router.weight.grad
    assert found is not None
    router.weight.grad = None
    logits = tokens @ router.weight.T
    shares = logits.softmax(-1)
    load = torch.bincount(index.reshape(-1), minlength=COUNT) / index.numel()
    loss = 0.3 * COUNT * (load * shares.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    (8.0 * loss).backward()
    torch.testing.assert_close(found, router.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 9}, "each token has 9 of 8 experts"),
        ({"top_k": 0}, "each token has 0 of 8 experts"),
        ({"capacity": 0.0}, "0 times its even share"),
        ({"balance": "els"}, "'els'"),
        ({"jitter": 1.0}, "less than 1"),
        ({"z_loss": -1.0}, "-1"),
        ({"balance_rate": -1.0}, "-1"),
        ({"balance": "none", "balance_rate": 0.1}, "nothing to balance"),
        ({"shared": -1}, "-1"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        experts(**options)


@pytest.mark.parametrize(
    ("modules", "plan", "slices", "said"),
    [
        ({"a": Experts(WIDTH, HIDDEN, 4)}, {}, 8, "'a.networks' has 4 experts, which 8 slices do not divide"),
        ({"a": Experts(WIDTH, HIDDEN, 6)}, {}, 4, "'a.networks' has 6 experts, which 4 slices do not divide"),
        ({"a": FeedForward(4, 8)}, {"a": "experts"}, 2, "'a' is a FeedForward, which is no stack of experts"),
        (
            {"a": Experts(WIDTH, HIDDEN, 4), "b": nn.LayerNorm(WIDTH)},
            {"b": "sequence_parallel"},
            2,
            "'a.networks' holds experts, which need all positions",
        ),
    ],
    ids=str,
)
def test_experts_that_cannot_be_divided_are_refused(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str], slices: int, said: str
) -> None:
    with pytest.raises(TaskError, match=said):
        cut_layers(modules, Slicing(plan, slices, experts=True))
