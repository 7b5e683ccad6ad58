"""A trial finds a task's mistakes, and each becomes a sentence with the remedy."""

from __future__ import annotations

import datetime
import gc
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from raytrain_plus import (
    Checkpoint,
    Data,
    EarlyStop,
    Ema,
    Evaluate,
    Job,
    KeepBest,
    Parallel,
    RunFacts,
    Task,
    WeightFiles,
    Workers,
    schedules,
)
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.training.model.model import model_to_load
from raytrain_plus.training.step.build import build_state
from raytrain_plus.trial import task_trial
from raytrain_plus.trial.fits import check_fits
from raytrain_plus.trial.task_trial import Trial, check_alike, try_on_cpu, try_whole

ROWS, WIDTH = 64, 6


class Sound(Task):
    """A task without a mistake; the others override one method."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"in": lambda: nn.Linear(WIDTH, 8), "out": lambda: nn.Linear(8, 3)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["label"])

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = model(batch["x"])
        return {
            "loss": F.cross_entropy(scores, batch["label"]),
            "accuracy": (scores.argmax(1) == batch["label"]).float().mean(),
        }


def job(tmp_path: Path, task: type[Task] = Sound, largest: int = 2) -> Job:
    if not (tmp_path / "data").exists():
        (tmp_path / "data").mkdir()
        rng = np.random.default_rng(0)
        x = pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=ROWS * WIDTH).astype("float32")), WIDTH)
        columns = {
            "x": x,
            "bytes": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * WIDTH) % 200, pa.uint8()), WIDTH),
            "label": pa.array(np.arange(ROWS) % (largest + 1)),
        }
        pq.write_table(pa.table(columns), tmp_path / "data" / "0.parquet", row_group_size=16)
    path = str(tmp_path / "data")
    return Job(
        name="x",
        task=task,
        data=Data(path=path, batch_size=32, shards=4),
        steps=2,
        workers=Workers(min=2, max=2),
        evaluate=Evaluate(path=path, every_steps=1),
    )


def tried(wished: Job) -> Trial:
    assert isinstance(wished.task, type)
    seen = parquet_source(wished.data.path)
    return try_on_cpu(wished, wished.task, rows_of(wished, seen, None), held_out_rows_of(wished, seen, None))


@pytest.fixture(params=[1, 2], ids=["whole", "in stages"])
def stages(request: pytest.FixtureRequest) -> Parallel:
    return Parallel(pipeline=request.param, microbatches=1)


WATCHED: list[weakref.ref[nn.Parameter]] = []


class Watched(Sound):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        def watched(build: Callable[[], nn.Module]) -> nn.Module:
            made = build()
            WATCHED.extend(map(weakref.ref, made.parameters()))
            return made

        return {name: partial(watched, build) for name, build in super().layers().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("reduction", ["ring", "exact"])
def test_nothing_of_a_tried_model_stays_in_memory(
    tmp_path: Path, stages: Parallel, precision: Any, reduction: Any
) -> None:
    tried(replace(job(tmp_path, Watched), parallel=stages, precision=precision, reduction=reduction))
    gc.collect()
    assert WATCHED
    assert all(one() is None for one in WATCHED)


def test_a_sound_task_is_tried_whole(tmp_path: Path) -> None:
    found = tried(job(tmp_path))
    assert (found.rows, found.of_rows, found.remarks, found.layers) == (8, 8, (), ())
    assert set(found.metrics) == {"loss", "accuracy"}
    assert found.bytes is not None
    assert 10e6 < found.bytes < 10e9


def test_a_sound_task_is_tried_layer_by_layer_with_the_same_metrics(tmp_path: Path) -> None:
    whole = tried(replace(job(tmp_path), task=Unmoved))
    found = tried(replace(job(tmp_path), task=Unmoved, parallel=Parallel(pipeline=2)))
    assert [layer.name for layer in found.layers] == ["in", "out"]
    assert found.metrics == pytest.approx(whole.metrics)


class Unmoved(Sound):
    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.0)


class Dated(Unmoved):
    def collate(self, table: pa.Table) -> Any:
        return super().collate(table) | {"when": [datetime.date(2020, 1, 2)]}


def test_what_cannot_pass_between_stages_is_named_with_its_place(tmp_path: Path) -> None:
    tried(job(tmp_path, Dated))
    with pytest.raises(
        TaskError, match=r"batch\['when'\]\[0\] is a datetime.date, which cannot pass between"
    ) as caught:
        tried(replace(job(tmp_path, Dated), parallel=Parallel(pipeline=2)))
    assert "Task.collate" in caught.value.remedy


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("sharded", ["optimizer", "full"])
def test_averages_are_tried_with_the_rows_of_one_worker(tmp_path: Path, sharded: Any, precision: Any) -> None:
    wished = replace(job(tmp_path, Unmoved), workers=Workers(min=4, max=4), precision=precision)
    whole = tried(wished)
    found = tried(replace(wished, parallel=Parallel(sharded=sharded), ema=Ema(decay=0.9)))
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-2 if precision == "bf16-params" else 1e-6)


class WrongColumn(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])


class WrongColumnInCollate(Sound):
    def collate(self, table: pa.Table) -> Any:
        return {"x": table.column("X"), "label": table.column("label")}


class Integers(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["bytes"]), batch["label"])


class Labels(Sound):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"in": lambda: nn.Linear(WIDTH, 8), "out": lambda: nn.Linear(8, 2)}


class Lookup(Sound):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"in": lambda: nn.Embedding(5, 4), "flat": nn.Flatten, "out": lambda: nn.Linear(4 * WIDTH, 3)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["bytes"].long()), batch["label"])


class Pair(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        scores = model(batch["x"])
        return F.cross_entropy(scores, batch["label"]), scores


class Vector(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


class Frozen(Sound):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        def frozen(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            return lambda: make().requires_grad_(False)

        return {name: frozen(make) for name, make in super().layers().items()}


class EmptyOptimizer(Sound):
    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for name, value in parameters if name.startswith("head")], lr=0.1)


class Signature(Sound):
    def loss(self, model: nn.Module) -> torch.Tensor:  # type: ignore[override]
        return model(torch.zeros(1, WIDTH))


class Width(Sound):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"in": lambda: nn.Linear(WIDTH + 1, 8), "out": lambda: nn.Linear(8, 3)}


class Detached(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).detach(), batch["label"])


class Attribute(Sound):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch.x), batch.label)


class BadEvaluation(Sound):
    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return {"loss": model(batch["x"])}


class NoStep(Sound):
    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        class Broken(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                raise ZeroDivisionError("no step")

        return Broken([value for _, value in parameters], lr=0.1)


MISTAKES: list[tuple[type[Task], str, str]] = [
    (WrongColumn, "WrongColumn.loss raised KeyError: 'labels'", "fix: did you mean 'label'?"),
    (WrongColumnInCollate, "WrongColumnInCollate.collate raised KeyError", "expected: one of the batch's names: x, "),
    (Integers, "Integers.loss raised RuntimeError", "fix: convert it, as in batch['bytes'].float()"),
    (Labels, "Labels.loss raised IndexError: Target 2 is out of bounds", "fix: give the last layer at least 3 outputs"),
    (Lookup, "Lookup.loss raised IndexError: index out of range in self", "fix: enlarge the nn.Embedding"),
    (Pair, "Pair.loss returned a tuple of 2", '"metrics": {"name": number}'),
    (Vector, "Vector.loss returned a loss of shape (8,)", '{"loss": tensor'),
    (Frozen, "the model has no trainable parameter", "fix: leave requires_grad of what is to be trained"),
    (
        EmptyOptimizer,
        "optimizer got an empty parameter list",
        "fix: correct the condition by which optimizer() chooses",
    ),
    (Signature, "Signature.loss(model: 'nn.Module') -> ", "expected: def loss(self, model, batch)"),
    (Width, "mat1 and mat2 shapes cannot be multiplied", "fix: correct the size of the layer"),
    (Detached, "depends on no trained parameter", ""),
    (Attribute, "'dict' object has no attribute 'x'", "expected: batch['x']"),
    (BadEvaluation, "evaluate returned 'loss', of shape (8, 3), which is not a single number", ""),
    (NoStep, "ZeroDivisionError: no step", ""),
]


@pytest.mark.parametrize(("task", "what", "remedy"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_becomes_a_sentence(
    tmp_path: Path, stages: Parallel, task: type[Task], what: str, remedy: str
) -> None:
    with pytest.raises(TaskError) as caught:
        tried(replace(job(tmp_path, task), parallel=stages))
    text = str(caught.value)
    assert what in text
    assert remedy in text


class Scheduled(Sound):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        assert self.run == RunFacts(total_steps=4, batch_size=32, rows=ROWS)
        return schedules.warmup_cosine(optimizer, self.run.total_steps)


def test_the_length_of_a_run_in_epochs_is_known(tmp_path: Path, stages: Parallel) -> None:
    tried(replace(job(tmp_path, Scheduled), steps=None, epochs=2, parallel=stages))


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (
            "checkpoint.keep_best.metric",
            {"checkpoint": Checkpoint(keep_best=KeepBest(metric="acuracy", mode="max"))},
        ),
        ("early_stop.metric", {"early_stop": EarlyStop(metric="acuracy", mode="max", patience=1)}),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_returned(
    tmp_path: Path, stages: Parallel, where: str, chosen: dict[str, Any]
) -> None:
    with pytest.raises(TaskError, match="evaluate returns no metric 'acuracy'") as caught:
        tried(replace(job(tmp_path), parallel=stages, **chosen))
    assert caught.value.where == where
    assert "did you mean 'accuracy'?" in str(caught.value)


def test_a_state_that_does_not_fit_is_named_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_trial, "total_memory", lambda device: 1 << 20)
    with pytest.raises(InputError, match="the training state of a worker takes about") as caught:
        tried(job(tmp_path))
    assert caught.value.where == "parallel.sharded"


@pytest.mark.parametrize(
    "parallel", [Parallel(sharded="optimizer"), Parallel(sharded="full")], ids=["optimizer", "full"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_a_sharded_task_is_tried_with_the_rows_of_one_worker(
    tmp_path: Path, parallel: Parallel, precision: Any
) -> None:
    wished = replace(job(tmp_path), parallel=parallel, workers=Workers(min=2, max=4), precision=precision)
    found = tried(wished)
    assert set(found.metrics) == {"loss", "accuracy"}
    assert found.state is not None
    assert found.bytes is not None


def test_a_microbatch_that_does_not_fit_says_what_to_change(tmp_path: Path) -> None:
    wished = job(tmp_path)
    rows = rows_of(wished, parquet_source(wished.data.path), None)
    with pytest.raises(InputError, match="a step with a microbatch of 8 rows needs about") as caught:
        try_whole(wished, Sound(), torch.device("cpu"), rows, None, 1 << 20)
    assert "use a larger machine, or a smaller model" in str(caught.value)
    wished = replace(job(tmp_path), data=Data(path="data", batch_size=4800, shards=4))
    with pytest.raises(InputError) as caught:
        check_fits(wished, PerRow(100.0, 10.0), 1200, 1100)
    assert "expected: at most 100 rows in a microbatch" in str(caught.value)
    assert "set parallel.microbatches to 12, data.shards to at least 48, or data.batch_size to at most 400" in str(
        caught.value
    )


def test_a_long_microbatch_is_tried_with_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_trial, "LONG_S", 1e-9)
    found = tried(job(tmp_path))
    assert (found.rows, found.of_rows) == (4, 8)
    assert found.remarks == ("a microbatch of 8 rows takes long, so one of 4 rows was tried",)


class Infinite(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * float("inf")


def test_a_loss_that_is_not_finite_is_noted(tmp_path: Path) -> None:
    """Whether it ends a run is decided in its first step."""
    [remark] = tried(job(tmp_path, Infinite)).remarks
    assert remark.startswith("the first microbatch gives a loss or gradients")


class Eights(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"].reshape(-1, 8, WIDTH)[:, 0]), batch["label"][::8])


def test_a_task_that_takes_no_small_batches_is_tried_with_a_real_one(tmp_path: Path) -> None:
    found = tried(job(tmp_path, Eights))
    assert (found.rows, found.bytes) == (8, None)


class Summary(Sound):
    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"scores": model(batch["x"])}

    def summarise(self, outputs: Any) -> dict[str, float]:
        if len(outputs["scores"]) < ROWS:
            raise ValueError("too few rows")
        return {"area": 1.0}


def test_a_summary_that_needs_more_rows_is_noted(tmp_path: Path, stages: Parallel) -> None:
    [remark] = tried(replace(job(tmp_path, Summary), parallel=stages)).remarks
    assert remark.startswith("Summary.summarise raised ValueError: too few rows; it had only 8 held-out rows")


class Bounded(Sound):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)


def test_a_trial_makes_one_step(tmp_path: Path) -> None:
    assert tried(replace(job(tmp_path, Bounded), steps=1)).remarks == ()


class SizedByItsFirstBatch(Sound):
    scale: torch.Tensor | None = None

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(len(batch["label"]))
        return (F.cross_entropy(model(batch["x"]), batch["label"], reduction="none") * self.scale).mean()


def test_a_task_may_keep_something_of_its_first_batchs_size(tmp_path: Path) -> None:
    found = tried(job(tmp_path, SizedByItsFirstBatch))
    assert (found.rows, found.bytes) == (8, None)


class Weightless(Sound):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return {"loss": super().loss(model, batch), "weight": 0}


def test_a_microbatch_of_weight_0_is_noted(tmp_path: Path) -> None:
    [remark] = tried(job(tmp_path, Weightless)).remarks
    assert remark.startswith("the loss of the first microbatch has the weight 0")


class Hidden(Sound):
    show = True  # type: ignore[assignment]


def test_an_attribute_that_hides_a_method_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the attribute 'show' hides the method show\(\)"):
        tried(job(tmp_path, Hidden))


SHARED = nn.Linear(WIDTH, 3)


class Shared(Sound):
    layers = Task.layers

    def model(self) -> nn.Module:
        return SHARED


@pytest.mark.parametrize(("task", "alike"), [(Sound, True), (Shared, False)])
def test_a_model_that_a_trial_has_changed_is_refused(tmp_path: Path, task: type[Task], alike: bool) -> None:
    """A worker's trial runs in its process, and other workers make none: their initial values would differ."""
    wished = job(tmp_path, task)
    found = tried(wished)
    built = build_state(wished, task(), torch.device("cpu"))
    if alike:
        check_alike(found, built, "task: a:B")
        return
    with pytest.raises(TaskError, match="other initial values when it is built a second time in the same process"):
        check_alike(found, built, "task: a:B")


class Walks:
    """A batch that looks like a mapping, and is none."""

    keys = 3


class Strange(Sound):
    def collate(self, table: pa.Table) -> Any:
        return Walks()


def test_an_error_about_a_strange_batch_is_the_tasks_own(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="'Walks' object is not subscriptable"):
        tried(job(tmp_path, Strange))


class Begun(Sound):
    """Its values come from a file, which names some of them."""

    FILE: Path

    def weights(self) -> WeightFiles:
        return WeightFiles(self.FILE)


def test_a_trial_compares_files_with_the_model_and_says_what_nothing_takes(
    tmp_path: Path, stages: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Begun, "FILE", tmp_path / "base.safetensors", raising=False)
    wished = replace(job(tmp_path, Begun), parallel=stages)
    with pytest.raises(TaskError, match="there is no file or folder"):
        tried(wished)
    values = model_to_load(Sound(), 0).state_dict()
    save_file({name: value for name, value in values.items() if name != "out.bias"}, Begun.FILE)
    with pytest.raises(TaskError, match=r"has no values for 1 of the model's weights: out\.bias"):
        tried(wished)
    save_file({**{name: value.zero_() for name, value in values.items()}, "old": torch.zeros(2)}, Begun.FILE)
    found = tried(wished)
    assert found.remarks == (f"{Begun.FILE} holds 1 tensor that the model does not take: old",)
    assert found.metrics["loss"] == pytest.approx(math.log(3), rel=0.1)
