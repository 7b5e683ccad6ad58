"""What a training function may not do is found in a trial: one sentence, its place, and the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tqdm
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Data, Evaluate, Job, Parallel, Session, TaskError, Workers
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import InputError
from raytrain_plus.job.task_loader import load_task, load_user_code
from raytrain_plus.session.unreached import unreached_line
from raytrain_plus.trial.task_trial import Trial, try_on_cpu

Function = Callable[[Session], None]
ROWS, WIDTH = 32, 6


def tried(tmp_path: Path, function: Function) -> Trial:
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.linspace(-1, 1, ROWS * WIDTH).astype("float32")), WIDTH)
    pq.write_table(pa.table({"x": x, "y": pa.array(np.arange(ROWS) % 3)}), tmp_path / "rows.parquet", row_group_size=8)
    path = str(tmp_path)
    cls = load_task(function, ())
    job = Job(
        name="x",
        task=cls,
        data=Data(path=path, batch_size=16, shards=2),
        steps=2,
        workers=Workers(min=1),
        evaluate=Evaluate(path=path, every_steps=1),
    )
    seen = parquet_source(path)
    return try_on_cpu(job, cls, rows_of(job, seen, None), held_out_rows_of(job, seen, None))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 3)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def sound(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch))


def test_a_sound_function_is_tried_without_remarks(tmp_path: Path) -> None:
    found = tried(tmp_path, sound)
    assert found.remarks == ()
    assert found.metrics["loss"] > 0


def breaks(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch))
        break


def returns_within(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        loss_of(model, batch)
        return


def twice(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch))
        session.step(loss_of(model, batch))


def never(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        loss_of(model, batch)


def backward(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        loss = loss_of(model, batch)
        loss.backward()
        session.step(loss)


def steps_itself(session: Session) -> None:
    model = session.model(linear)
    optimizer: Any = session.optimizer(lambda named: torch.optim.SGD([value for _, value in named], lr=0.1))
    for batch in session.batches():
        optimizer.zero_grad()
        session.step(loss_of(model, batch))


def schedules_itself(session: Session) -> None:
    model = session.model(linear)
    scheduler: Any = session.scheduler(lambda made: torch.optim.lr_scheduler.ConstantLR(made))
    for batch in session.batches():
        session.step(loss_of(model, batch))
        scheduler.step()


def own_optimizer(session: Session) -> None:
    model = session.model(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in session.batches():
        loss = loss_of(model, batch)
        session.step(loss)
        for value in model.parameters():
            value.grad = torch.ones_like(value)
        optimizer.step()


def no_model(session: Session) -> None:
    model = linear()
    for batch in session.batches():
        session.step(loss_of(model, batch))


def two_models(session: Session) -> None:
    session.model(linear)
    session.model(linear)


def no_loop(session: Session) -> None:
    session.model(linear)


def given_a_model(session: Session) -> None:
    session.model(linear())  # type: ignore[arg-type]


def builds_nothing(session: Session) -> None:
    session.model(lambda: None)  # type: ignore[arg-type,return-value]


def declares_late(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.evaluate(lambda model, batch: {})
        session.step(loss_of(model, batch))


def declares_twice(session: Session) -> None:
    session.model(linear)
    session.evaluate(lambda model, batch: {})
    session.evaluate(lambda model, batch: {})


def optimizer_made(session: Session) -> None:
    model = session.model(linear)
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


def steps_before(session: Session) -> None:
    session.model(linear)
    session.step(torch.zeros(1))


def looks_before(session: Session) -> None:
    session.model(linear)
    if session.total_steps > 3:
        raise AssertionError


def in_autocast(session: Session) -> None:
    model = session.model(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in session.batches():
            session.step(loss_of(model, batch))


def in_a_device(session: Session) -> None:
    model = session.model(linear)
    with torch.device("meta"):
        for batch in session.batches():
            session.step(loss_of(model, batch))


def without_gradients(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        torch.set_grad_enabled(False)
        session.step(loss_of(model, batch))


def sets_training(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        model.train()
        session.step(loss_of(model, batch))


def sets_training_last(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch))
        model.train()


def sets_evaluation(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        model.eval()
        session.step(loss_of(model, batch))


def sets_training_and_measures(session: Session) -> None:
    model = session.model(linear)
    session.evaluate(lambda model, batch: {"held_out_loss": loss_of(model, batch)})
    for batch in session.batches():
        model.train()
        session.step(loss_of(model, batch))


def test_a_loop_that_no_held_out_batch_passes_through_may_set_training(tmp_path: Path) -> None:
    assert set(tried(tmp_path, sets_training_and_measures).metrics) == {"held_out_loss"}


def fills(session: Session) -> None:
    model = session.model(linear)
    nn.init.zeros_(model.weight)  # type: ignore[arg-type]
    for batch in session.batches():
        session.step(loss_of(model, batch))


def resets(session: Session) -> None:
    model = session.model(lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)))
    model[1].reset_running_stats()  # type: ignore[operator,index]
    for batch in session.batches():
        session.step(loss_of(model, batch))


def adds(session: Session) -> None:
    model = session.model(linear)
    model.more = nn.Linear(3, 3)
    for batch in session.batches():
        session.step(loss_of(model, batch))


def replaces(session: Session) -> None:
    model = session.model(linear)
    model.weight = nn.Parameter(torch.zeros(3, WIDTH))
    for batch in session.batches():
        session.step(loss_of(model, batch))


def keeps_what_is_not_measured(session: Session) -> None:
    model = session.model(linear)
    session.after_step(lambda state, metrics: {"a": metrics["accuracy"]})
    for batch in session.batches():
        session.step(loss_of(model, batch))


def optimizes_nothing(session: Session) -> None:
    model = session.model(linear)
    session.optimizer(lambda: torch.optim.SGD(model.parameters()))  # type: ignore[arg-type,misc]
    for batch in session.batches():
        session.step(loss_of(model, batch))


def measures_a_name(session: Session) -> None:
    model = session.model(linear)
    session.evaluate(lambda model, batch: {"a": batch["z"]})
    for batch in session.batches():
        session.step(loss_of(model, batch))


def raises_held_out(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch if model.training else {}))


@pytest.mark.parametrize(
    ("function", "what", "expected"),
    [
        (
            keeps_what_is_not_measured,
            "measured: the function of session.after_step raised KeyError: 'accuracy'",
            "",
        ),
        (optimizes_nothing, "optimizes_nothing: the function of session.optimizer raised TypeError: ", ""),
        (measures_a_name, "measures_a_name: the function of session.evaluate raised KeyError: 'z'", "names: x, y"),
        (raises_held_out, "raises_held_out raised KeyError: 'x'", "a task for batches of 'x'"),
    ],
)
def test_what_a_declared_function_raises_is_no_fault_of_the_batch(
    tmp_path: Path, function: Function, what: str, expected: str
) -> None:
    with pytest.raises(TaskError) as caught:
        tried(tmp_path, function)
    assert what in caught.value.what
    assert expected in caught.value.expected if expected else not caught.value.expected


def takes_on_a_thread(session: Session) -> None:
    session.model(linear)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: next(session.batches())).result()


def raises(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(F.cross_entropy(model(batch["z"]), batch["y"]))


def detached(session: Session) -> None:
    model = session.model(linear)
    for batch in session.batches():
        session.step(loss_of(model, batch).detach())


@pytest.mark.parametrize(
    ("function", "line", "what", "remedy"),
    [
        (breaks, 0, "breaks left its loop, and a loop ends with its run alone", "set steps, epochs or early_stop"),
        (returns_within, 0, "returns_within left its loop", "session.stop()"),
        (twice, 4, "session.step is called twice for one batch", "session.step(first + second)"),
        (never, 2, "the loop takes the next batch, and gave no loss of this one", "call session.step(loss) for each"),
        (backward, 4, "the loop makes a backward pass, and the run makes one of each loss", "leave out loss.backward"),
        (steps_itself, 4, "the loop uses optimizer.zero_grad, and the run itself", "leave out optimizer.zero_grad"),
        (schedules_itself, 5, "the loop uses scheduler.step, and the run itself", "leave out scheduler.step"),
        (own_optimizer, None, "the loss changed the", ""),
        (no_model, 2, "no_model takes a batch before it has a model", "call model = session.model(build)"),
        (two_models, 2, "two_models calls session.model twice, and a run trains one model", "into one nn.Module"),
        (no_loop, 0, "no_loop returned before it took a batch", "for batch in session.batches()"),
        (given_a_model, 1, "session.model was given a Linear", "a function that returns the model"),
        (builds_nothing, 1, "session.model: the function returned NoneType", "a torch.nn.Module"),
        (declares_late, 3, "session.evaluate is called inside the loop", "before the loop"),
        (declares_twice, 3, "declares_twice calls session.evaluate twice", "one call"),
        (optimizer_made, 2, "session.optimizer was given a SGD", "a function of (name, parameter) pairs"),
        (steps_before, 2, "session.step is called outside the loop", "for batch in session.batches()"),
        (looks_before, 2, "session.total_steps is not known before the loop", "in what session.optimizer"),
        (in_autocast, 3, "the loop stands in a context of torch", "set precision in the job"),
        (in_a_device, 3, "the loop stands in a context of torch", "in the body of the loop"),
        (without_gradients, 2, "the loop stands in a context of torch", "in the body of the loop"),
        (sets_training, 4, "the loop sets the mode of the model", "leave out model.train()"),
        (sets_training_last, 2, "the loop sets the mode of the model", "leave out model.train()"),
        (sets_evaluation, 4, "the loop sets the mode of the model", "leave out model.train()"),
        (fills, 0, "fills changes 'weight' of the model after session.model", "which builds the model"),
        (resets, 0, "resets changes '1.running_mean' of the model", "which builds the model"),
        (adds, 0, "adds changes 'more.weight' of the model after session.model", "which builds the model"),
        (replaces, 0, "replaces changes 'weight' of the model after session.model", "which builds the model"),
        (takes_on_a_thread, 3, "takes_on_a_thread takes a batch on a thread of its own", "the thread that runs"),
        (raises, None, "raises raised KeyError: 'z'", "correct the name"),
        (detached, None, "depends on no trained parameter", ""),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(
    tmp_path: Path, function: Function, line: int | None, what: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        tried(tmp_path, function)
    assert torch.is_grad_enabled()
    assert torch.empty(0).device == torch.device("cpu")
    error = caught.value
    assert what in error.what
    assert remedy in f"{error.expected} {error.remedy}"
    if line is not None:
        assert error.where == f"{Path(__file__).name}:{function.__code__.co_firstlineno + line}"


def counting(session: Session) -> None:
    model = session.model(linear)
    total, seen, losses = 0.0, 0, list[float]()
    mask = torch.zeros(3)
    for batch in session.batches():
        loss = loss_of(model, batch)
        total += loss.item()
        losses.append(loss.item())
        mask[0] = 1
        session.step(loss)
    print(total, seen)


def test_what_a_batch_leaves_and_what_is_not_executed_is_remarked(tmp_path: Path) -> None:
    kept, unreached = sorted(tried(tmp_path, counting).remarks)
    assert kept.startswith("a batch changes losses, mask, total of counting: each worker has its own")
    line = counting.__code__.co_firstlineno + 10
    assert unreached.startswith(f"line {line}, behind the loop of counting, is not executed")


class Mean:
    def __init__(self) -> None:
        self.value = 0.0


def carrying(session: Session) -> None:
    model = session.model(linear)
    ema, history, kept = {"ema": 0.0}, np.zeros(3), [[0]]
    for batch in session.batches():
        session.step(loss_of(model, batch))
        ema["ema"] += 1
        history[0] += 1
        kept[0][0] += 1


def teaching(session: Session) -> None:
    model = session.model(linear)
    teacher, mean = copy.deepcopy(model), Mean()
    for batch in session.batches():
        session.step(loss_of(model, batch))
        mean.value += 1
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)


def unchanging(session: Session) -> None:
    model = session.model(lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)))
    wrapped, bar = nn.Sequential(model), tqdm.tqdm(disable=True)
    held = {"model": model, "nan": float("nan"), "names": [["x"]], "mean": Mean(), "array": np.zeros(3)}
    for batch in session.batches():
        bar.n += len(held)
        session.step(loss_of(wrapped, batch))


def test_what_a_batch_changes_inside_objects_is_remarked(tmp_path: Path) -> None:
    [carried] = tried(tmp_path, carrying).remarks
    assert carried.startswith("a batch changes ema, history, kept of carrying: each worker has its own")
    [taught] = tried(tmp_path, teaching).remarks
    assert taught.startswith("a batch changes mean, teacher of teaching: each worker has its own")
    assert tried(tmp_path, unchanging).remarks == ()


def in_blocks(session: Session) -> None:
    with open("x"):
        for _ in range(3):
            for _ in enumerate(session.batches()):
                pass
        print()


def in_a_function(session: Session) -> None:
    model = session.model(linear)

    def fit() -> None:
        for batch in session.batches():
            session.step(loss_of(model, batch))

    fit()


def test_what_is_behind_a_loop_is_found_in_blocks_around_it() -> None:
    assert unreached_line(in_blocks) == in_blocks.__code__.co_firstlineno + 5
    assert unreached_line(sound) is None
    assert unreached_line(in_a_function) is None
    assert unreached_line(print) is None
    assert unreached_line(eval("lambda session: 1")) is None


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (Parallel(pipeline=2), "parallel.pipeline: 2: "),
        (Parallel(tensor=2), "parallel.tensor: 2: "),
        (Parallel(sharded="full"), "parallel.sharded: full: "),
    ],
)
def test_a_model_that_would_be_divided_is_refused(tmp_path: Path, parallel: Parallel, said: str) -> None:
    (tmp_path / "owned.py").write_text("def main(session): ...\n")
    data = Data(path="rows", batch_size=8, shards=2)
    job = Job(name="x", task="owned:main", data=data, steps=1, workers=Workers(min=2), parallel=parallel)
    with pytest.raises(TaskError, match=f"^{said}the function main has a loop of its own, which needs the whole model"):
        load_user_code(job, [tmp_path])
    allowed = Job(name="x", task="owned:main", data=data, steps=1, workers=Workers(min=2))
    assert load_user_code(allowed, [tmp_path]).task.__name__ == "main"
