"""A training function with a loop of its own trains as a task does, and its loop is never left."""

from __future__ import annotations

import gc
import math
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from raytrain_plus import Data, Job, RunFacts, Session, Task, TaskError, Workers
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import Interrupted, TrainingError
from raytrain_plus.job.task_loader import build_task, is_signal, load_task, users_frames
from raytrain_plus.job.task_pickle import task_to_send
from raytrain_plus.job.task_source import source_digests
from raytrain_plus.session.plain_values import plain_values
from raytrain_plus.session.session_task import SessionTask
from raytrain_plus.state.transfer import take_snapshot
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.build import build_state, task_of, whole_steps
from raytrain_plus.training.step.step import SynchronousSteps

STEPS, ROWS, SHARDS = 6, 4, 3
FACTS = RunFacts(total_steps=STEPS, batch_size=ROWS * SHARDS, rows=30)
BEGUN: list[str] = []
"""A note of each execution of a function, and of each that was left."""


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def main(session: Session, rate: float = 0.05) -> None:
    BEGUN.append("begun")
    model = session.model(build)
    optimizer = session.optimizer(lambda named: torch.optim.SGD([value for _, value in named], lr=rate))
    session.scheduler(lambda made: torch.optim.lr_scheduler.LinearLR(made, total_iters=session.total_steps))
    try:
        for batch in session.batches():
            scores = model(batch["x"])
            loss = F.cross_entropy(scores, batch["y"])
            session.step(loss, metrics={"accuracy": (scores.argmax(1) == batch["y"]).float().mean()})
    finally:
        BEGUN.append("left")
    del optimizer


class Same(Task):
    def __init__(self, rate: float = 0.05) -> None:
        self.rate = rate

    def model(self) -> nn.Module:
        return build()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=self.rate)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.run.total_steps)

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        scores = model(batch["x"])
        accuracy = (scores.argmax(1) == batch["y"]).float().mean()
        return {"loss": F.cross_entropy(scores, batch["y"]), "metrics": {"accuracy": accuracy}}


def job(task: Any, **settings: Any) -> Job:
    data = Data(path="nowhere", batch_size=FACTS.batch_size, shards=SHARDS)
    return Job(name="x", task=task, data=data, steps=STEPS, workers=Workers(min=1), **settings)


def steps_of(function: Any, **settings: Any) -> SynchronousSteps:
    wished = job(load_task(function, ()), **settings)
    assert isinstance(wished.task, type)
    task = task_of(wished, wished.task, STEPS, FACTS.rows)
    return whole_steps(build_state(wished, task, torch.device("cpu")))


def shards(step: int) -> dict[int, list[Microbatch]]:
    draw = torch.Generator().manual_seed(step)

    def batch() -> Any:
        return {"x": torch.randn(ROWS, 6, generator=draw), "y": torch.randint(3, (ROWS,), generator=draw)}

    return {shard: [Microbatch(batch(), ROWS)] for shard in range(SHARDS)}


def context(control: Control | None = None) -> StepContext:
    return StepContext(world=SoloWorld(), control=control or Control(), wait_s=10)


def trained(function: Any, **settings: Any) -> tuple[list[float], list[torch.Tensor], list[float]]:
    steps = steps_of(function, **settings)
    applied = [steps.run(step, shards(step), context()) for step in range(STEPS)]
    values = [value.detach().clone() for value in steps.state.module.parameters()]
    return [one.loss for one in applied], values, [one.metrics.get("accuracy", -1.0) for one in applied]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "exact"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"recompute": "full"},
        {"compile": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_function_trains_to_the_same_bits_as_a_task(settings: dict[str, Any]) -> None:
    BEGUN.clear()
    losses, values, accuracies = trained(main, **settings)
    assert BEGUN.count("begun") == 1
    expected = trained(Same, **settings)
    assert (losses, accuracies) == (expected[0], expected[2])
    assert all(torch.equal(one, other) for one, other in zip(values, expected[1], strict=True))
    assert losses[0] != losses[-1]


def test_a_function_trains_as_a_plain_loop() -> None:
    losses, values, _ = trained(plain)
    # As the run draws them.
    steps = steps_of(plain)
    model = steps.state.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [one.batch for [one] in shards(step).values()]
        loss = F.cross_entropy(model(torch.cat([one["x"] for one in batches])), torch.cat([b["y"] for b in batches]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    for one, other in zip(model.parameters(), values, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-4, atol=1e-6)


def plain(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    session.optimizer(lambda named: torch.optim.SGD([value for _, value in named], lr=0.1))
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def test_an_interrupt_and_a_computed_again_step_leave_the_function_where_it_waits() -> None:
    BEGUN.clear()
    steps, control = steps_of(main), Control()
    control.begin(0)
    steps.run(0, shards(0), context(control))
    hooked = next(steps.state.module.parameters()).register_hook(lambda _: control.interrupt(0))
    with pytest.raises(Interrupted):
        steps.run(1, shards(1), context(control))
    hooked.remove()
    control.begin(1)
    again = steps.run(1, shards(1), context(control))
    assert BEGUN == ["begun"]
    expected = steps_of(Same)
    assert again.loss == [expected.run(step, shards(step), context()) for step in range(2)][-1].loss


def test_after_an_error_the_function_begins_again() -> None:
    BEGUN.clear()
    steps = steps_of(main)
    steps.run(0, shards(0), context())
    wrong = {0: [Microbatch({"x": torch.zeros(ROWS, 5), "y": torch.zeros(ROWS, dtype=torch.int64)}, ROWS)]}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        steps.run(1, wrong, context())
    again = steps.run(1, shards(1), context())
    assert BEGUN == ["begun", "left", "begun"]
    expected = steps_of(Same)
    assert again.loss == [expected.run(step, shards(step), context()) for step in range(2)][-1].loss


def draws(session: Session) -> None:
    before = random.random() + float(np.random.rand()) + torch.rand(1)
    model = session.model(build)
    after = random.random() + float(np.random.rand()) + torch.randn(6, 6)
    for batch in session.batches():
        noise = torch.randn(ROWS, 6) + random.random() + float(np.random.rand())
        session.step(F.cross_entropy(model(batch["x"] @ after + before + noise), batch["y"]))


def test_a_function_that_begins_again_draws_what_it_has_drawn() -> None:
    steps = steps_of(draws)
    wrong = {0: [Microbatch({"x": torch.zeros(ROWS, 5), "y": torch.zeros(ROWS, dtype=torch.int64)}, ROWS)]}
    found = []
    for step in range(STEPS):
        if step in (1, 3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                steps.run(step, wrong, context())
        found.append(steps.run(step, shards(step), context()).loss)
    assert found == trained(draws)[0]


def test_what_a_function_draws_before_its_loop_depends_on_the_seed_of_the_job() -> None:
    def loss(seed: int) -> torch.Tensor:
        task = build_task(load_task(draws, ()), {}, FACTS)
        torch.manual_seed(seed)
        model = task.model()
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.linspace(-1, 1, value.numel()).view_as(value))
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        found: torch.Tensor = task.loss(model.eval(), shards(0)[0][0].batch)["loss"]
        return found

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)


def test_another_thread_executes_the_function_from_its_top() -> None:
    BEGUN.clear()
    steps = steps_of(main)
    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(steps.run, step, shards(step), context()).result().loss for step in range(STEPS)]
    assert found == trained(Same)[0]
    assert BEGUN.count("begun") == 2


def test_a_function_that_waits_is_freed_with_its_model() -> None:
    gc.collect()
    BEGUN.clear()
    steps = steps_of(main)
    steps.run(0, shards(0), context())
    model = weakref.ref(steps.state.module)
    del steps
    # The first pass frees the function, which holds the model.
    gc.collect()
    gc.collect()
    assert model() is None
    assert BEGUN == ["begun", "left"]


def catches_all(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    batches = session.batches()
    while True:
        try:
            batch = next(batches)
            session.step(F.cross_entropy(model(batch["x"]), batch["y"]))
        except BaseException:
            BEGUN.append("caught")
            if len(BEGUN) > 100:
                raise


def test_a_function_that_catches_its_end_is_left_nevertheless() -> None:
    gc.collect()
    BEGUN.clear()
    steps = steps_of(catches_all)
    steps.run(0, shards(0), context())
    assert BEGUN == []
    del steps
    gc.collect()
    gc.collect()
    assert 0 < len(BEGUN) < 10


SEEN: list[Any] = []


def watching(session: Session, pace: int = 1) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in tqdm.tqdm(session.batches(), disable=pace < 0):
        SEEN.append((session.steps, session.epoch, session.total_steps, torch.is_autocast_enabled("cpu")))
        SEEN.append((threading.current_thread().name, torch.is_grad_enabled(), model.training))
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def test_the_function_sees_where_the_run_stands_and_what_torch_keeps_for_its_thread() -> None:
    SEEN.clear()
    steps = steps_of(watching, precision="bf16")
    for step in range(STEPS):
        steps.run(step, shards(step), context())
    assert SEEN[::2] == [
        (step, step * FACTS.batch_size // 30, STEPS, True) for step in range(STEPS) for _ in range(SHARDS)
    ]
    assert set(SEEN[1::2]) == {("MainThread", True, True)}


def loading(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    others = iter(DataLoader([torch.ones(6) * n for n in range(500)], batch_size=4, num_workers=1))
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"] + 0 * next(others)), batch["y"]))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_function_can_use_a_loader_with_processes_of_its_own() -> None:
    assert len(trained(loading)[0]) == STEPS


def test_held_out_batches_pass_through_the_loop_unless_the_function_says_what_is_measured() -> None:
    batch = shards(0)[0][0].batch
    steps = steps_of(main)
    with torch.no_grad():
        found = steps.state.task.evaluate(steps.state.module.eval(), batch)
    assert set(found) == {"loss", "accuracy"}
    declared = steps_of(measured)
    with torch.no_grad():
        assert declared.state.task.evaluate(declared.state.module, batch) == {"rows": ROWS}
        given = steps_of(weighted)
        found = given.state.task.evaluate(given.state.module, batch)
    assert (set(found), found["weight"]) == ({"metrics", "weight"}, 2.0)


def annealed(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    session.after_step(lambda state, _: {"count": state.get("count", 0) + 1})
    for batch in session.batches():
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        session.step(loss, metrics={"steps": session.steps, "count": session.state.get("count", 0)})


def test_held_out_metrics_see_the_step_after_the_state_on_all_workers() -> None:
    stayed, joined = steps_of(annealed), steps_of(annealed)
    for step in range(3):
        stayed.run(step, shards(step), context())
    joined.state.adopt(take_snapshot(2, stayed.state.holding()))

    def found(steps: SynchronousSteps) -> dict[str, float]:
        held_out, hosted = shards(9), range(SHARDS)
        return evaluate(steps.state, steps.passes, held_out.__getitem__, hosted, context(), shards=SHARDS, step=2)

    assert found(joined) == found(stayed)
    assert (found(joined)["steps"], found(joined)["count"]) == (3, 3)


def stops_on_sight(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))
        session.stop()


def test_a_held_out_batch_stops_no_run() -> None:
    task, batch = build_task(load_task(stops_on_sight, ()), {}, FACTS), shards(0)[0][0].batch
    assert isinstance(task, SessionTask)
    model = task.model()
    with torch.no_grad():
        task.evaluate(model, batch)
    assert not task.stops()
    task.loss(model, batch)
    assert task.stops()


def measured(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    session.evaluate(lambda _, batch: {"rows": len(batch["x"])})
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def weighted(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]), weight=2.0)


def test_arguments_of_a_job_are_those_of_the_function_after_the_session() -> None:
    cls = load_task(main, ())
    assert (cls.__name__, cls.__module__) == ("main", __name__)
    task = build_task(cls, {"rate": 0.5}, FACTS)
    model = task.model()
    assert task.optimizer(model.named_parameters()).param_groups[0]["lr"] == 0.5
    with pytest.raises(TaskError, match=r"args.widht: main\(...\) takes no argument 'widht'\n  expected: one of rate"):
        build_task(cls, {"widht": 1})


def wide(session: Session, self: int, *, depth: int = 1) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]) * self * depth)


def test_an_argument_that_is_missing_is_named_before_the_function_begins() -> None:
    cls = load_task(wide, ())
    with pytest.raises(
        TaskError, match=r"raised TypeError: missing a required argument: 'self'[\s\S]*given: depth"
    ) as caught:
        build_task(cls, {"depth": 2})
    assert caught.value.user_traceback == ""
    task = build_task(cls, {"self": 2}, FACTS)
    assert task.loss(task.model(), shards(0)[0][0].batch)["loss"].item() > 0


def test_without_an_optimizer_it_is_that_of_any_task() -> None:
    task = build_task(load_task(plain, ()), {}, FACTS)
    assert type(task.optimizer(task.model().named_parameters())) is torch.optim.SGD
    task = build_task(load_task(watching, ()), {}, FACTS)
    assert type(task.optimizer(task.model().named_parameters())) is torch.optim.AdamW


def generator(session: Session) -> Iterator[int]:
    yield 1


def takes_nothing() -> None: ...


class Trainer:
    def main(self, session: Session) -> None: ...


def by_position(session: Session, width: int, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (generator, r"test_session_task:generator is a generator or async\n  expected: a plain function: def main"),
        (Trainer.main, r"Trainer.main is a method[\s\S]*def main\(session\), or a staticmethod"),
        (by_position, r"by_position takes 'width' by its position alone"),
        (takes_nothing, r"test_session_task:takes_nothing takes no session\n  expected: def takes_nothing\(session\)"),
    ],
)
def test_what_is_no_training_function_is_named(function: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        load_task(function, ())


def test_what_a_model_undergoes_before_the_loop_is_part_of_it() -> None:
    steps = steps_of(freezes)
    assert [value.requires_grad for value in steps.state.module.parameters()] == [False, True]
    with ThreadPoolExecutor(1) as pool:
        # The same function again, with a model that is frozen already.
        assert pool.submit(steps.run, 0, shards(0), context()).result().loss > 0


def freezes(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    model.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def sets_modes(session: Session) -> None:
    model = session.model(normed)
    model.train()
    model[1].eval()  # type: ignore[operator]
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def test_a_function_that_begins_again_leaves_the_modes_that_the_run_has_set() -> None:
    task, other = build_task(load_task(sets_modes, ()), {}, FACTS), normed().eval()
    assert [one.training for one in task.model().modules()] == [True, True, False, True]
    with torch.no_grad():
        task.evaluate(other, shards(0)[0][0].batch)
    assert not any(one.training for one in other.modules())


def swallows(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in session.batches():
        try:
            session.step(F.cross_entropy(model(batch["x"]), batch["z"]))
        except Exception:
            session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def test_a_loop_may_catch_its_own_errors() -> None:
    assert trained(swallows)[0][-1] > 0


def test_a_loss_of_another_kind_is_named_as_that_of_a_task() -> None:
    with pytest.raises(TrainingError, match=r"text\.loss returned an object of type str"):
        trained(text)


def text(session: Session) -> None:
    session.model(lambda: nn.Linear(6, 3))
    for _ in session.batches():
        session.step("loss")  # type: ignore[arg-type]


def remembering(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    session.after_step(lambda state, metrics: {"mean": 0.5 * state.get("mean", 0.0) + metrics["loss"] + metrics["one"]})
    for batch in session.batches():
        SEEN.append(session.state.get("mean"))
        if session.steps == 3:
            session.stop()
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]), metrics={"one": 1.0})


def test_what_a_function_remembers_is_part_of_the_state() -> None:
    SEEN.clear()
    steps, joined = steps_of(remembering), steps_of(remembering)
    task = steps.state.stepwise
    assert task is not None
    losses, asked, expected = [], [], 0.0
    for step in range(STEPS):
        losses.append(steps.run(step, shards(step), context()).loss)
        asked.append(task.stops())
        expected = 0.5 * expected + losses[-1] + 1.0
        assert steps.state.remembered == {"mean": expected}
        if step == 2:
            joined.state.adopt(take_snapshot(step, steps.state.holding()))
    assert asked == [step == 3 for step in range(STEPS)]
    assert SEEN[0] is None
    assert len(set(SEEN)) == STEPS
    SEEN.clear()
    assert [joined.run(step, shards(step), context()).loss for step in range(3, STEPS)] == losses[3:]
    assert joined.state.remembered == {"mean": expected}
    assert SEEN[0] == steps_at(losses[:3])


def steps_at(losses: list[float]) -> float:
    mean = 0.0
    for loss in losses:
        mean = 0.5 * mean + loss + 1.0
    return mean


def test_a_step_that_cannot_be_remembered_changes_nothing() -> None:
    steps = steps_of(forgets)
    before = [value.detach().clone() for value in steps.state.module.parameters()]
    with pytest.raises(TaskError, match=r"session.after_step returned what is no JSON[\s\S]*none of them NaN"):
        steps.run(0, shards(0), context())
    assert steps.state.last_applied == -1
    assert all(torch.equal(one, other) for one, other in zip(before, steps.state.module.parameters(), strict=True))


def forgets(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    session.after_step(lambda state, metrics: {"loss": float("nan")})
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


class Pair(SoloWorld):
    """A world in which another worker has the same sums, and another state."""

    size = 2

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        if name == "remembered":
            tensor[0] += 1
        return super().reduce(tensor, name, operation)


def test_workers_that_remember_differently_are_told() -> None:
    steps = steps_of(remembering)
    steps.run(0, shards(0), context())
    other = StepContext(world=Pair(), control=Control(), wait_s=10)
    with pytest.raises(TrainingError, match="what the task remembers before step 1 differs between workers"):
        steps.run(1, shards(1), other)


@pytest.mark.parametrize(
    ("state", "said"),
    [(None, "returned NoneType"), ({"a": object()}, "no JSON"), ({"a": "x" * 70_000}, "returned 70,009 bytes")],
)
def test_what_is_no_small_mapping_is_not_kept(state: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        plain_values(state)


def test_a_function_itself_is_a_task_in_python(tmp_path: Path) -> None:
    wished = job(main)
    assert "task: tests.unit.session.test_session_task:main" in wished.to_yaml()
    assert wished.same_as(job(f"{__name__}:main").to_yaml()) == []
    pickled = task_to_send(wished)
    assert pickled is not None
    (tmp_path / "task.pkl").write_bytes(pickled)
    code = (
        "import cloudpickle, sys; from pathlib import Path\n"
        "cls = cloudpickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "assert 'tests' not in sys.modules\n"
        "task = cls(rate=0.5)\n"
        "print(cls.__name__, task.optimizer(task.model().named_parameters()).param_groups[0]['lr'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "task.pkl")], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.returncode) == ("main 0.5\n", 0), done.stderr


def test_the_code_of_a_function_is_what_its_task_was_made_from() -> None:
    assert __name__ in source_digests(job(main), [])
    assert source_digests(job(main), []) == source_digests(job(f"{__name__}:main"), [])


def interrupted(session: Session) -> None:
    model = session.model(lambda: nn.Linear(6, 3))
    for batch in session.batches():
        signal.raise_signal(signal.SIGINT)
        session.step(F.cross_entropy(model(batch["x"]), batch["y"]))


def test_a_signal_ends_the_function_as_any_other() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        trained(interrupted)
    assert is_signal(caught.value)
    assert [frame.name for frame in users_frames(caught.value)].count("interrupted") == 1


def test_the_function_computes_with_the_model_that_it_is_given() -> None:
    task = build_task(load_task(plain, ()), {}, FACTS)
    first, batch = task.model(), shards(0)[0][0].batch
    with torch.no_grad():
        for value in first.parameters():
            value.zero_()
    task.model()
    assert task.loss(first, batch)["loss"].item() == pytest.approx(math.log(3))
