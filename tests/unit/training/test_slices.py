"""A step of replicas whose layers are cut into slices equals the step of one worker: the same bits with exact sums."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Data, Job, Parallel, Task, Workers, layers
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.layers import cross_entropy
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import host_shards
from raytrain_plus.parallel.pipeline.memory import hosting_slices
from raytrain_plus.parallel.pipeline.transport import swapped
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.state.named import state_sha256
from raytrain_plus.task import Task as AnyTask
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.model.model import build_chunks, build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.passes import stage as replica_module
from raytrain_plus.training.passes.stage import ReplicaStage, replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from raytrain_plus.trial.measure import measure_layers
from raytrain_plus.trial.slice_check import check_slices
from raytrain_plus.workers.messages import Layers
from tests.support import stages
from tests.support.stages import (
    Ring,
    RingWorld,
    Told,
    check_alike,
    check_same,
    control,
    state_of,
    tensors_of,
)
from tests.unit.parallel.pipeline.replicas import COMPUTES, Mail, Threads, at_once
from tests.unit.parallel.tensor import hosting
from tests.unit.training import linked as links
from tests.unit.training.group import context

one_computes_at_a_time = stages.one_computes_at_a_time
by_nccl = links.by_nccl

SHARDS, STEPS, SEED, SLICES = 4, 3, 3, 4
WIDTH, HEADS, WORDS = 32, 4, 24
CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention and a network, with dropout after each; `fixed`: written for all heads at once."""

    def __init__(self, fixed: bool = False, inner: float = 0.0) -> None:
        super().__init__()
        self.fixed, self.inner = fixed, inner
        self.norm = nn.LayerNorm(WIDTH)
        # A bias of keys has no gradient but rounding errors, which AdamW turns into whole steps.
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = HEADS if self.fixed else -1
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.inner)
        x = x + self.drop(self.mix(attended.transpose(1, 2).flatten(-2)))
        found: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(x))))
        return found


class Small(Task):
    """A GPT with tied weights, in slices."""

    def __init__(self, **block: Any) -> None:
        self.block = block

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "embed": lambda: nn.Embedding(WORDS, WIDTH),
            "block0": lambda: Block(**self.block),
            "block1": Block,
            "head": lambda: nn.Linear(WIDTH, WORDS, bias=False),
        }

    def tied(self) -> dict[str, str]:
        return {"head.weight": "embed.weight"}

    def tensor(self) -> Mapping[str, str]:
        blocks = {"block*.qkv": "colwise", "block*.mix": "rowwise", "block*.up": "colwise", "block*.down": "rowwise"}
        return {"embed": "vocab", **blocks, "head": "colwise"}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), batch[:, 1:].reshape(-1))


class Divided(Small):
    """Its norms and dropouts compute some of the positions for each slice."""

    def tensor(self) -> Mapping[str, str]:
        return {**super().tensor(), "block*.norm": "sequence_parallel", "block*.drop": "sequence_parallel"}


class Sparse(Small):
    """Its blocks have experts: one drops some tokens, and the router of the other has losses of its own."""

    rate = 1e-2

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        def block(**options: Any) -> Callable[[], nn.Module]:
            return lambda: layers.Block(WIDTH, HEADS, feed_forward=layers.Experts(WIDTH, 64, 8, **options), dropout=0.2)

        blocks = {
            "block0": block(top_k=1, capacity=1.0, jitter=0.1),
            "block1": block(top_k=2, balance="loss", balance_rate=self.rate, z_loss=1e-2, shared=1),
        }
        return {"embed": super().layers()["embed"], **blocks, "head": super().layers()["head"]}

    def tensor(self) -> Mapping[str, str]:
        return {}


class SparseInSlices(Sparse):
    """Its attention is cut, too."""

    def tensor(self) -> Mapping[str, str]:
        return layers.transformer_plan(embed="embed", blocks="block*", experts=True) | {"head": "colwise"}


def slicing(made: AnyTask, slices: int, link: Link | None = None) -> Slicing:
    return Slicing(made.tensor(), slices, link or Link(), experts=isinstance(made, Sparse))


def batches(step: int, hosted: tuple[int, ...], data: bool = True) -> dict[int, list[Microbatch]]:
    """Two microbatches for each shard; without data for a worker that reads none."""
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        for index in range(2):
            batch = torch.randint(0, WORDS, (3, 9), generator=draw) if data else None
            made.setdefault(shard, []).append(Microbatch(batch, 3, start=step * 6, ids=100 * step + 10 * shard + index))
    return made


def alone(
    exact: bool = True, slices: int = SLICES, technique: Technique = PLAIN, task: Callable[[], AnyTask] = Small
) -> Told:
    """One worker's results; it hosts all slices."""
    made = task()
    how = slicing(made, slices) if slices > 1 else None
    one = whole_steps(state_of(made, [build_model(made, SEED, CPU, how)], exact, technique))
    applied = [one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld())) for step in range(STEPS)]
    return applied, tensors_of(one.state)


CHUNKS = {1: [["embed", "block0", "block1", "head"]], 2: [["embed", "block0"], ["block1", "head"]]}


def together(
    shape: Shape,
    exact: bool = True,
    technique: Technique = PLAIN,
    task: Callable[[], AnyTask] = Small,
    chunks: list[list[str]] | None = None,
    threads: Callable[..., Any] = Threads,
) -> list[Told]:
    """The results of each worker of a group."""
    lines = shape.lines("replica")
    chunks = CHUNKS[shape.stages] if chunks is None else chunks
    rings = {seat: ring for line in lines for ring in [Ring(shape.replicas)] for seat in line}
    mails: list[Mail] = [defaultdict(queue.SimpleQueue) for _ in range(shape.replicas)]
    hosted = host_shards(SHARDS, shape.replicas)
    where = {name: stage for stage, names in enumerate(chunks) for name in names}

    def worker(seat: int) -> Told:
        stage, made = shape.stage(seat), task()
        link = Link(stage.rank, stage.ranks)
        with COMPUTES:
            built = build_chunks(made, SEED, CPU, [chunks[stage.number]], slicing(made, SLICES, link))
            state = state_of(made, built, exact, technique)
            state.link = link
        replica = shape.place(seat).replica
        tied = Layers(stage, (), where, SLICES).apart(state.tied)
        peers = threads(stage.index, mails[replica])
        passes = replica_stage(Synchronous, state, peers, schedule="1f1b", stages=shape.stages, tied=tied)
        one, world = SynchronousSteps(state, passes), RingWorld(replica, rings[seat])
        applied = [
            one.run(
                step,
                batches(step, hosted[replica], data=stage.index == 0),
                StepContext(world=world, control=control(), wait_s=5),
            )
            for step in range(STEPS)
        ]
        return applied, tensors_of(one.state)

    return at_once(worker, range(shape.size))


@pytest.fixture(autouse=True)
def others_compute_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators, which belong to the process, are those of this worker again when it goes on."""

    def released(waits: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            drawn = torch.get_rng_state()
            COMPUTES.release()
            try:
                return waits(*arguments)
            finally:
                COMPUTES.acquire()
                torch.set_rng_state(drawn)

        return call

    monkeypatch.setattr(replica_module, "swapped", released(swapped))
    monkeypatch.setattr(ReplicaStage, "take_flags", released(ReplicaStage.take_flags))


def collected(told: list[Told], shape: Shape, replica: int) -> dict[str, torch.Tensor]:
    """The whole state, of all workers of a replica; what several have is the same on each."""
    whole: dict[str, torch.Tensor] = {}
    for seat in shape.lines("stage", "tensor_rank")[replica]:
        for name, value in told[seat][1].items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


@pytest.fixture(scope="module")
def of_one() -> Told:
    return alone()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 2),
        Shape(2, 2, 2),
        pytest.param(Shape(1, 1, 4), marks=pytest.mark.slow),
        pytest.param(Shape(1, 2, 2), marks=pytest.mark.slow),
        pytest.param(Shape(2, 1, 2), marks=pytest.mark.slow),
        pytest.param(Shape(2, 2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_bits_do_not_depend_on_who_hosts_the_slices(shape: Shape, of_one: Told) -> None:
    check_alike(together(shape), shape, of_one, collected)


def test_so_it_is_by_nccl(of_one: Told, by_nccl: None) -> None:
    shape = Shape(2, 2, 2)
    linked = links.Linked("1f1b", shape)
    check_alike(together(shape, threads=linked), shape, of_one, collected)
    assert linked.carried == set(linked.directions)


@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16", "fp16")), "bf16-params"]
)
def test_so_it_is_in_16_bits_and_with_layers_computed_again(name: Any) -> None:
    technique = Technique(Precision(name), "full")
    applied, state = alone(technique=technique)
    shape = Shape(1, 1, 2)
    told = together(shape, technique=technique)
    assert [found for found, _ in told] == [applied, applied]
    whole = collected(told, shape, 0)
    assert [key for key in state if not torch.equal(state[key], whole[key])] == []


@pytest.mark.parametrize(
    ("shape", "technique"),
    [
        (Shape(2, 2, 2), PLAIN),
        (Shape(1, 1, 2), Technique(clip_value=0.01)),
        pytest.param(Shape(1, 1, 4), Technique(Precision("bf16"), "full"), marks=pytest.mark.slow),
        pytest.param(Shape(2, 1, 4), PLAIN, marks=pytest.mark.slow),
        pytest.param(Shape(1, 2, 2), Technique(Precision("fp16")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_so_it_is_with_positions_that_are_divided(shape: Shape, technique: Technique) -> None:
    applied, state = alone(technique=technique, task=Divided)
    told = together(shape, technique=technique, task=Divided)
    check_alike(told, shape, (applied, state), collected)


@pytest.mark.parametrize(
    ("task", "shape", "technique"),
    [
        (Sparse, Shape(2, 2, 2), PLAIN),
        (SparseInSlices, Shape(1, 1, 4), Technique(Precision("bf16"), "full")),
        pytest.param(Sparse, Shape(1, 2, 4), Technique(clip_value=0.01), marks=pytest.mark.slow),
        pytest.param(Sparse, Shape(4, 1, 1), PLAIN, marks=pytest.mark.slow),
        pytest.param(SparseInSlices, Shape(2, 1, 2), Technique(Precision("fp16")), marks=pytest.mark.slow),
        pytest.param(Sparse, Shape(1, 1, 2), Technique(Precision("bf16-params")), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm keeps float32
def test_so_it_is_with_experts(task: type[Sparse], shape: Shape, technique: Technique) -> None:
    """Bias and load of the experts are state: they are the same for all hosts, replicas and numbers of them."""
    applied, state = alone(technique=technique, task=task)
    told = together(shape, technique=technique, task=task)
    check_alike(told, shape, (applied, state), collected)
    rows = STEPS * SHARDS * 2 * 3
    routed = state["buffer/block0.feed_forward.router.routed"]
    assert int(routed[:8].sum()) == int(routed[9]) == rows // STEPS * 8
    assert int(routed[8]) > 0
    assert not state["buffer/block0.feed_forward.router.tally"].any()
    raised = state["buffer/block0.feed_forward.router.raised"]
    assert raised.any()
    assert raised.abs().max() <= STEPS


class Ruled(Sparse):
    """The loss of its second router outweighs that of the task."""

    rate = 1e3


def test_losses_of_a_router_are_scaled_as_the_loss_is() -> None:
    """With fp16 the loss is multiplied by 2^16, and its gradients are divided by that."""
    states = [alone(technique=Technique(Precision(name)), task=Ruled, slices=1)[1] for name in ("fp32", "fp16")]
    weights = [state["param/block1.feed_forward.router.weight"] for state in states]
    torch.testing.assert_close(*weights, rtol=0, atol=2e-4)


class OfTransformers(Task):
    """A whole model of Transformers, with its own plan and its own loss; it declares no layers."""

    def __init__(self, kind: str = "Llama", cut: tuple[str, ...] = ("model", "lm_head")) -> None:
        self.kind, self.cut = kind, cut

    def model(self) -> Any:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{self.kind}Config")(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=256,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=16,
            num_hidden_layers=2,
            tie_word_embeddings=self.kind == "Llama",
        )
        return getattr(transformers, f"{self.kind}ForCausalLM")(config)

    def tensor(self) -> Any:
        return {name: word for name, word in self.model().tp_plan.items() if name.startswith(self.cut)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        # Adam would turn the rounding errors of the smallest gradients into full steps.
        return torch.optim.SGD([value for _, value in parameters], lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_a_model_without_layers_has_the_same_bits_on_any_hosts(kind: str) -> None:
    def task() -> OfTransformers:
        return OfTransformers(kind)

    applied, state = alone(task=task)
    expected, whole = alone(task=task, slices=1)
    assert [one.loss for one in applied] == pytest.approx([one.loss for one in expected], rel=1e-5)
    for ranks in (2, 4):
        told = together(Shape(1, 1, ranks), task=task, chunks=[["model", "lm_head"]])
        assert all(found == applied for found, _ in told)
        check_same(collected(told, Shape(1, 1, ranks), 0), state)
    model = build_model(task(), SEED, CPU, Slicing(task().tensor(), SLICES)).module
    weights = {name.removeprefix("param/"): value for name, value in state.items() if name.startswith("param/")}
    joined = hosting.whole(weights, model)
    # Weights that are tied have one name without slices, and are copies with them.
    assert joined.keys() - {"lm_head.weight"} == {
        name.removeprefix("param/") for name in whole if name.startswith("param/")
    } - {"lm_head.weight"}
    for name, value in whole.items():
        if name.startswith("param/"):
            torch.testing.assert_close(joined[name.removeprefix("param/")], value, rtol=1e-4, atol=1e-6)


def test_a_model_without_layers_has_its_tensors_in_modules() -> None:
    class Loose(OfTransformers):
        def model(self) -> Any:
            made = super().model()
            made.scale = nn.Parameter(torch.ones(1))
            return made

    with pytest.raises(TaskError, match="'scale' belongs to the top-level module"):
        checked(Loose())


@pytest.mark.parametrize("task", [Small, Divided])
def test_slices_train_as_the_whole_layers_do(task: type[Small]) -> None:
    applied, state = alone(task=task)
    expected, whole = alone(slices=1)
    assert [one.loss for one in applied] == pytest.approx([one.loss for one in expected], rel=1e-5)
    made = task()
    model = build_model(made, SEED, CPU, Slicing(made.tensor(), SLICES)).module
    weights = {name.removeprefix("param/"): value for name, value in state.items() if name.startswith("param/")}
    joined = hosting.whole(weights, model)
    assert joined.keys() == {name.removeprefix("param/") for name in whole if name.startswith("param/")}
    for name, value in joined.items():
        torch.testing.assert_close(value, whole[f"param/{name}"], rtol=1e-4, atol=1e-5)


class HookedSlices(Small):
    """Hooks of what is not cut, around what is."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        def block() -> nn.Module:
            made = Block()
            made.norm.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            made.register_full_backward_hook(lambda _, given, __: tuple(one.clamp(-1e-4, 1e-4) for one in given))
            return made

        return super().layers() | {"block0": block}


def test_slices_train_with_hooks_of_what_is_not_cut() -> None:
    applied, state = alone(task=HookedSlices)
    told = together(Shape(1, 1, 2), task=HookedSlices)
    check_alike(told, Shape(1, 1, 2), (applied, state), collected)
    whole, _ = alone(task=HookedSlices, slices=1)
    assert [one.loss for one in applied] == pytest.approx([one.loss for one in whole], rel=1e-4)


@pytest.mark.parametrize("hook", ["weight", "module"])
def test_hooks_of_what_is_cut_are_refused(hook: str) -> None:
    class Cut(Small):
        def layers(self) -> dict[str, Callable[[], nn.Module]]:
            def block() -> nn.Module:
                made = Block()
                if hook == "weight":
                    made.up.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
                else:
                    made.up.register_full_backward_hook(lambda *_: None)
                return made

            return super().layers() | {"block0": block}

    with pytest.raises(TaskError, match=r"'block0.up' has hooks, which slices would not have"):
        alone(task=Cut)


def test_ring_sums_differ_by_rounding_only(of_one: Told) -> None:
    for applied, _ in together(Shape(2, 1, 2), exact=False):
        assert [one.loss for one in applied] == pytest.approx([one.loss for one in of_one[0]], rel=1e-5)


def test_other_slices_in_the_middle_of_a_sum_are_noticed(of_one: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: sums in another order have other bits."""

    def backwards(self: Link, parts: Any) -> torch.Tensor:
        total = parts[-1]
        for part in parts[-2::-1]:
            total = total + part
        return total

    monkeypatch.setattr(Link, "sum", backwards)
    assert state_sha256(alone()[1]) != state_sha256(of_one[1])


def checked(task: AnyTask, slices: int = SLICES, reduction: Any = "ring") -> None:
    job = Job(
        name="job",
        task="module:Task",
        data=Data(path="rows", batch_size=24, shards=4),
        steps=3,
        parallel=Parallel(tensor=slices),
        reduction=reduction,
        workers=Workers(min=1),
    )
    check_slices(job, task, CPU, batches(0, (0,))[0][0])


class Normed(Small):
    """Normalizes the heads that a slice has, by weights that all share; `named`: the plan says so."""

    def __init__(self, named: bool = True) -> None:
        super().__init__()
        self.named = named

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Queries(Block):
            def __init__(self) -> None:
                super().__init__()
                self.heads = nn.RMSNorm(WIDTH // HEADS)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                heads = self.heads(self.qkv(self.norm(x)).unflatten(-1, (3, -1, WIDTH // HEADS)).select(-3, 0))
                found: torch.Tensor = x + self.mix(heads.flatten(-2))
                return found

        return {**super().layers(), "block1": Queries}

    def tensor(self) -> Mapping[str, str]:
        return {**super().tensor(), **({"block1.heads": "replicated_with_grad_allreduce"} if self.named else {})}


class Masked(Small):
    """A mask of booleans passes between its layers."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Masks(nn.Embedding):
            def forward(self, text: torch.Tensor) -> Any:
                return super().forward(text), text > 3

        class Masked(Block):
            def forward(self, given: Any) -> torch.Tensor:
                x, mask = given
                return super().forward(x * mask.unsqueeze(-1))

        return {**super().layers(), "embed": lambda: Masks(WORDS, WIDTH), "block0": Masked}

    def tied(self) -> dict[str, str]:
        return {}

    def tensor(self) -> Mapping[str, str]:
        return {name: word for name, word in super().tensor().items() if name != "embed"}


FITTING = [
    (Small(), SLICES),
    (Divided(), SLICES),
    (Normed(), SLICES),
    (Masked(), SLICES),
    (OfTransformers("Llama", cut=("model.layers",)), SLICES),
    (OfTransformers("Qwen3"), 2),
]


@pytest.mark.parametrize(("task", "slices"), FITTING, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("reduction", ["ring", "exact"])
def test_a_plan_that_fits_passes_the_check(reduction: str, task: AnyTask, slices: int) -> None:
    checked(task, slices, reduction)


class Undrawn(Divided):
    """Its dropouts draw for the positions that are here."""

    def tensor(self) -> Mapping[str, str]:
        return {name: word for name, word in super().tensor().items() if name != "block*.drop"}


class Narrow(Small):
    """Its activation gets so few features of a slice that they do not fill a register."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Gated(Block):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 92), nn.Linear(92, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = x + self.down(F.silu(self.up(x)))
                return found

        return {**super().layers(), "block1": Gated}

    def tensor(self) -> Mapping[str, str]:
        return {"block1.up": "colwise", "block1.down": "rowwise"}


def test_slices_with_other_bits_on_several_hosts_are_refused_if_sums_are_exact() -> None:
    checked(Narrow())
    with pytest.raises(TaskError, match="the layer 'block1' computes other last bits when its slices are hosted apart"):
        checked(Narrow(), reduction="exact")


class Interleaved(Small):
    """Its fused projection has the heads outside, the three inside, and a name that says otherwise."""

    def tensor(self) -> Mapping[str, str]:
        return {"block*.up": "colwise", "block*.down": "rowwise", "block*.norm": "colwise"}


class Unplanned(Small):
    def tensor(self) -> Mapping[str, str]:
        return {}


class Misplaced(Small):
    """Its activation mixes features of several slices."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Mixes(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = x + self.down(torch.softmax(self.up(self.mix(self.qkv(x)[..., :WIDTH])), -1))
                return found

        return {**super().layers(), "block1": Mixes}

    def tensor(self) -> Mapping[str, str]:
        return {"block*.up": "colwise", "block*.down": "rowwise"}


class Plain(nn.Module):
    """A network after a norm without weights, of which a plan may think that it gets some of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


class Undivided(Small):
    """Gets numbers, and no layer divides their positions."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        head = lambda: nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)  # noqa: E731
        return {"block0": Plain, "block1": Plain, "head": head}

    def tied(self) -> dict[str, str]:
        return {}

    def tensor(self) -> Mapping[str, str]:
        return {"block*.norm": "sequence_parallel", "block*.up": "colwise", "block*.down": "rowwise"}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        numbers = torch.sin(batch[:, :-1, None] * torch.arange(1.0, 1 + WIDTH))
        return F.cross_entropy(model(numbers).reshape(-1, WORDS), batch[:, 1:].reshape(-1))


class First(Divided):
    """Scores the first position that a worker has, by weights that are not trained."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Head(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.out = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scores: torch.Tensor = self.out(x[:, 0])
                return scores

        return {**super().layers(), "head": Head}

    def tied(self) -> dict[str, str]:
        return {}

    def tensor(self) -> Mapping[str, str]:
        return {name: word for name, word in super().tensor().items() if name != "head"}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]), batch[:, 1])


class Crossed(Divided):
    """Its attention gets a second tensor, which another layer computes."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = self.out(torch.tanh(self.q(x) + self.q(other)))
                return found

        class Cross(Block):
            def __init__(self) -> None:
                super().__init__()
                self.attention = Attention()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = x + self.attention(self.norm(x), x)
                return found

        return {**super().layers(), "block0": Cross}

    def tensor(self) -> Mapping[str, str]:
        return {**super().tensor(), "block0.attention.q": "colwise", "block0.attention.out": "rowwise"}


class Listed(Small):
    """Computes with layers that it keeps in a list, too, where they are not replaced."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Lists(Block):
            def __init__(self) -> None:
                super().__init__()
                self.table = [self.up, self.down]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = x + self.table[1](F.gelu(self.table[0](x)))
                return found

        return {**super().layers(), "block1": Lists}


class Twice(Undivided):
    """A model without layers that has a module under two names."""

    def layers(self) -> Any:
        return None

    def model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = self.out = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = self.out(torch.tanh(self.inner(x)))[..., :WORDS]
                return found

        return Model()

    def tensor(self) -> Mapping[str, str]:
        return {"inner": "colwise"}


@pytest.mark.parametrize(
    ("task", "slices", "what"),
    [
        (Small(fixed=True), 2, "the layer 'block0' cannot compute with one of 2 slices: RuntimeError: unflatten"),
        (Small(inner=0.1), 2, "the layer 'block0' draws random numbers that would depend on how many slices"),
        (Undrawn(), 2, "the layer 'block0' draws random numbers that would depend on how many slices"),
        (
            Normed(named=False),
            2,
            "'block1.heads.weight' gets another gradient on a worker with one of 2 slices than in",
        ),
        (Undivided(), 2, "'block1.up.weight' gets another gradient on a worker with one of 2 slices than in"),
        (First(), 2, "the layer 'head' returns something else on each of the workers that have one of 2 slices"),
        (Crossed(), 2, "'block0.attention', which is cut into slices, gets a second tensor with a gradient"),
        (Listed(), 2, "'block1.up.weight' gets another gradient on a worker with one of 2 slices than in"),
        (Twice(), 2, "'out' is a module with another name"),
        (Small(), 8, "cannot compute with one of 8 slices"),
        (Small(), 16, "'embed' has 24 rows, which 16 slices do not divide"),
        (Unplanned(), 2, "Unplanned.tensor() names nothing to cut"),
        (Interleaved(), 2, "'block0.norm' is a LayerNorm, which cannot be cut colwise"),
        (Misplaced(), 2, "the layer 'block1' returns something else when it is cut into 2 slices"),
    ],
)
def test_what_slices_cannot_compute_is_refused_with_the_layer(task: Task, slices: int, what: str) -> None:
    with pytest.raises(TaskError) as refused:
        checked(task, slices)
    assert what in str(refused.value)


class Counts(Small):
    """Returns from its loss how often the largest score is that of the next token, and keeps scores with slices."""

    def tensor(self) -> Mapping[str, str]:
        return {**super().tensor(), "head": "colwise_loss"}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        scores = model(batch[:, :-1])
        return {
            "loss": cross_entropy(scores, batch[:, 1:]),
            "metrics": {"largest": scores.argmax(-1).float().mean()},
        }


def test_a_metric_of_the_scores_of_some_tokens_is_refused() -> None:
    with pytest.raises(TaskError, match=r"the metric 'largest' of the loss is .* on a worker with one of 2 slices"):
        checked(Counts(), 2)


def test_the_optimizer_gets_the_names_of_whole_weights() -> None:
    names: list[str] = []

    class Named(Small):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            pairs = list(parameters)
            names.extend(name for name, _ in pairs)
            return torch.optim.SGD([value for _, value in pairs], lr=0.1)

    made = Named()
    state_of(made, [build_model(made, SEED, CPU, Slicing(made.tensor(), 2))], exact=False)
    assert names.count("block0.qkv.weight") == 2
    assert not any("@" in name for name in names)


def test_a_tied_parameter_that_is_cut_counts_once() -> None:
    made = Small()
    [microbatch, *_] = batches(0, (0,))[0]
    layers = measure_layers(made, SEED, PLAIN, microbatch, slicing=Slicing(made.tensor(), 2))
    whole = {layer.name: (layer.parameters, layer.own_parameters) for layer in layers}
    assert (whole["embed"], whole["head"]) == ((WORDS * WIDTH, WORDS * WIDTH), (WORDS * WIDTH, 0))
    hosted = {layer.name: (layer.parameters, layer.own_parameters) for layer in hosting_slices(layers, 2)}
    assert (hosted["embed"], hosted["head"]) == ((WORDS * WIDTH // 2, WORDS * WIDTH // 2), (WORDS * WIDTH // 2, 0))


def test_a_state_knows_where_its_slices_are() -> None:
    made = Small()
    state = TrainState(made, [build_model(made, SEED, CPU, Slicing(made.tensor(), 2))], Summing(SHARDS), seed=SEED)
    cuts = state.holding().cuts
    assert cuts["block0.qkv"] == ("column", 3)
    assert (cuts["block1.down"], cuts["embed"]) == (("row", 1), ("vocabulary", 1))
