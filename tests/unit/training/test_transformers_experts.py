"""Sparse models of Transformers: their experts, cut by their own plan, compute what the whole model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Data, Job, Parallel, Task, Workers
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.layers import own_plan
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slice_plan import words_for
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.training.model.model import build_model
from raytrain_plus.trial.slice_check import check_slices
from tests.unit.parallel.tensor.hosting import Passed, check_bits, gradients_of, whole

transformers = pytest.importorskip("transformers")

SEED, WORDS = 3, 24
CPU = torch.device("cpu")
TOKENS = torch.randint(WORDS, (3, 9), generator=torch.Generator().manual_seed(1))
SMALL: Mapping[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 64}),
    # Of its two layers, the first one is dense.
    "dense qwen3": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 64, "mlp_only_layers": [0]}),
}
PRODUCTS = ("grouped_mm", "batched_mm", "eager")
"""How Transformers computes experts; the first one is what it takes by itself."""


class Sparse(Task):
    """A model with experts, whose loss has the auxiliary one, and its own plan."""

    def __init__(self, kind: str, product: str | None = None, **config: Any) -> None:
        self.kind, self.product, self.config = kind, product, config

    def model(self) -> Any:
        name, own = KINDS[self.kind]
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **own, **self.config})
        config._experts_implementation = self.product
        return getattr(transformers, f"{name}ForCausalLM")(config)

    def tensor(self) -> Mapping[str, str]:
        with torch.device("meta"):
            return own_plan(self.model())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss


def passed(
    task: Task, slices: int = 1, link: Link | None = None, *, tensor: bool = False, lower: bool = False
) -> tuple[Passed, nn.Module]:
    """Return the loss and the gradients of a model, and the model itself; `lower`: in bfloat16."""
    plan = words_for(task.tensor(), tensor=tensor, experts=True)
    slicing = Slicing(plan, slices, link or Link(), experts=True) if slices > 1 else None
    model = build_model(task, SEED, CPU, slicing).module
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        loss = task.loss(model, TOKENS)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return (loss.detach(), gradients_of(model)), model


def test_grouped_products_are_what_transformers_takes() -> None:
    assert Sparse("mixtral").model().config._experts_implementation == PRODUCTS[0]


@pytest.mark.parametrize(
    ("product", "tensor"), [*((product, False) for product in PRODUCTS), (PRODUCTS[0], True)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_experts_compute_what_the_whole_model_does(kind: str, product: str, tensor: bool) -> None:
    task = Sparse(kind, product)
    (loss, gradients), _ = passed(task)
    for slices in (2, 4):
        (found, own), model = passed(task, slices, tensor=tensor)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0.0)
        joined = whole(own, model)
        assert joined.keys() == gradients.keys()
        for name, value in joined.items():
            torch.testing.assert_close(value, gradients[name], rtol=1e-5, atol=1e-6, msg=name)
        stacked = [name for name, _ in model.named_parameters() if "experts" in name]
        assert all("@" in name for name in stacked)
        assert len(stacked) == slices * len([name for name in gradients if "experts" in name])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_the_bits_do_not_depend_on_who_hosts_the_experts(kind: str, product: str) -> None:
    check_bits(lambda link: passed(Sparse(kind, product), 4, link, tensor=True)[0])


@pytest.mark.parametrize("product", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_so_it_is_in_bfloat16(kind: str, product: str) -> None:
    task = Sparse(kind, product)
    check_bits(lambda link: passed(task, 4, link, lower=True)[0])
    (loss, gradients), _ = passed(task, lower=True)
    (found, own), model = passed(task, 4, lower=True)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0.0)
    for name, value in whole(own, model).items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-5, atol=1e-6, msg=name)


def checked(task: Task, **parallel: int) -> None:
    """Make the check of a job with exact sums."""
    job = Job(
        name="job",
        task="module:Task",
        data=Data(path="rows", batch_size=24, shards=4),
        steps=3,
        parallel=Parallel(**parallel),
        reduction="exact",
        workers=Workers(min=1),
    )
    check_slices(job, task, CPU, Microbatch(TOKENS, 3, start=0, ids=0))


@pytest.mark.parametrize("parallel", [{"experts": 4}, {"experts": 2, "tensor": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("task", [Sparse("mixtral", router_jitter_noise=0.2), Sparse("qwen3")], ids=["jitter", "plain"])
def test_a_model_that_brings_its_plan_passes_the_check(task: Task, parallel: Mapping[str, int]) -> None:
    """With `tensor` alone its experts are whole."""
    checked(task, **parallel)


class Planned(Sparse):
    """Its plan is the model's `tp_plan`, which cuts experts by their features."""

    def tensor(self) -> Mapping[str, str]:
        return dict(self.model().tp_plan)


class Listed(Sparse):
    """The experts are modules in a list, as they were before Transformers 5; `named`: the plan names them."""

    def __init__(self, *, named: bool) -> None:
        super().__init__("mixtral")
        self.named = named

    def model(self) -> Any:
        made = super().model()
        for layer in made.model.layers:
            layer.mlp = nn.Module()
            layer.mlp.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        return made

    def tensor(self) -> Mapping[str, str]:
        return {"model.layers.*.mlp.experts": "experts"} if self.named else {}


@pytest.mark.parametrize(
    ("task", "parallel", "said"),
    [
        (
            Sparse("qwen3", num_experts=6),
            {"experts": 4},
            "'model.layers.0.mlp.experts' has 6 experts, which 4 slices do not divide",
        ),
        (
            Listed(named=False),
            {"experts": 2},
            r"the model has no layers.Experts, and Listed.tensor\(\) names no o",
        ),
        (Listed(named=True), {"experts": 2}, "is a ModuleList, which is no stack of experts: its parameter '0.weight'"),
        (Planned("mixtral"), {"tensor": 2}, r"by 'moe_tp_experts'(.|\n)*layers.own_plan\(model\)"),
        (Planned("mixtral"), {"experts": 2}, r"and Planned.tensor\(\) names no others"),
    ],
    ids=["six", "list", "named list", "features", "features beside experts"],
)
def test_experts_that_cannot_be_cut_are_refused_in_one_sentence(
    task: Task, parallel: Mapping[str, int], said: str
) -> None:
    with pytest.raises(TaskError, match=said):
        checked(task, **parallel)


def test_a_models_plan_names_what_it_has() -> None:
    plan = {name: Sparse(name).tensor() for name in KINDS}
    experts, dense = "model.layers.*.mlp.experts", "model.layers.*.mlp.up_proj"
    assert {name: one.get(experts) for name, one in plan.items()} == dict.fromkeys(KINDS, "ep_dispatch_experts")
    assert [name for name, one in plan.items() if dense in one] == ["dense qwen3"]
    assert all(one["model.layers.*.self_attn.q_proj"] == "colwise" for one in plan.values())
    assert own_plan(nn.Linear(2, 2)) == {}
