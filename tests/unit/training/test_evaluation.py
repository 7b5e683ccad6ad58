"""Held-out metrics are exact means over rows, for any assignment of shards."""

from __future__ import annotations

import copy
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import Interrupted, TrainingError
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import Built
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing

ROWS = {0: [3, 3, 1], 1: [4], 2: [1]}


class Means(Task):
    def __init__(self, figures: Any = None) -> None:
        self.figures = figures

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        assert not model.training
        assert not torch.is_grad_enabled()
        if self.figures == "few":
            return {"value": batch.mean()} if batch[0] < 7 else {"other": 1.0}
        return {"value": batch.mean()} if self.figures is None else self.figures


class Together:
    """A world whose members' sums meet in this process."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self._barrier = threading.Barrier(size)
        self._parts: dict[str, list[torch.Tensor]] = {}

    def reduce(self, tensor: torch.Tensor, name: str, operation: str = "sum") -> Any:
        self._parts.setdefault(name, []).append(tensor.clone())
        self._barrier.wait(10)
        parts = torch.stack(self._parts[name])
        tensor.copy_(parts.sum(dim=0) if operation == "sum" else parts.amax(dim=0))
        return SoloWorld().reduce(tensor, name)

    def of(self, rank: int) -> Together:
        """Return the interface of one member."""
        member = copy.copy(self)
        member.rank = rank
        return member

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        whole = torch.zeros_like(into).view(self.size, -1)
        whole[self.rank] = tensor.reshape(-1)
        self.reduce(whole, name)
        return SoloWorld().gather(whole, into, name)


def batches(shard: int) -> list[Microbatch]:
    start = sum(sum(ROWS[other]) for other in range(shard))
    values = torch.arange(start, start + sum(ROWS[shard]), dtype=torch.float32)
    return [Microbatch(part, len(part)) for part in values.split(ROWS[shard])]


def figures(
    hosted: list[int], world: Any, figure: Any = None, control: Control | None = None, task: Task | None = None
) -> dict[str, float]:
    state = TrainState(task or Means(figure), [Built(nn.Linear(1, 1), ())], Summing(3), seed=3)
    context = StepContext(world=world, control=control or begun(), wait_s=10.0)
    return evaluate(state, whole_steps(state).passes, batches, hosted, context, shards=3, step=7)


def begun() -> Control:
    control = Control()
    control.begin(0)
    return control


def test_metrics_are_row_means_with_the_same_bits_on_any_number_of_workers() -> None:
    alone = figures([0, 1, 2], SoloWorld())
    assert alone["value"] == np.arange(12).mean()
    for layout in ([[0], [1, 2]], [[2], [0], [1]]):
        world = Together(len(layout))
        with ThreadPoolExecutor(len(layout)) as members:
            told = list(members.map(partial(figures, world=world), layout, timeout=20))
        assert told == [alone] * len(layout)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (3.0, "expected a dict"),
        (
            {"loss": torch.zeros(2)},
            r"'loss', of shape \(2,\), which is not a single number, nor one for each .* 3 rows",
        ),
        ({"loss": torch.zeros(3, 2)}, "values of several dimensions need a Task.summarise"),
        ({"loss": None}, "of type NoneType, which is not a single number"),
    ],
)
def test_invalid_metrics_are_rejected(wrong: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        figures([0, 1, 2], SoloWorld(), wrong)


def test_metric_names_must_agree_between_batches_and_workers() -> None:
    with pytest.raises(TrainingError, match="different metrics for different batches: value, and other"):
        figures([0, 1, 2], SoloWorld(), "few")
    world = Together(2)
    with ThreadPoolExecutor(2) as members:
        tries = [members.submit(figures, hosted, world, "few") for hosted in ([0], [2])]
        for tried in tries:
            with pytest.raises(TrainingError, match="different metrics for different batches"):
                tried.result(20)


class Rows(Task):
    """Returns the rows' values, of several types."""

    def __init__(self, summary: Any = None) -> None:
        self.summary, self.seen = summary, list[dict[str, torch.Tensor]]()

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        pairs = torch.stack([batch, -batch], 1).to(torch.bfloat16)
        return {"loss": batch.mean(), "row": batch.long(), "pairs": pairs, "even": batch % 2 == 0}

    def summarise(self, outputs: Any) -> Any:
        self.seen.append(outputs)
        return {"share": outputs["even"].float().mean(), "nothing": math.nan} if self.summary is None else self.summary


class RowMeans(Task):
    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return {"value": batch}


def test_values_of_rows_are_averaged() -> None:
    assert figures([0, 1, 2], SoloWorld(), task=RowMeans()) == figures([0, 1, 2], SoloWorld())


def test_one_worker_summarises_all_rows_in_order() -> None:
    for layout in ([[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]], [[1], [0, 2]]):
        world, tasks = Together(len(layout)), [Rows() for _ in layout]
        with ThreadPoolExecutor(len(layout)) as members:
            tries = [
                members.submit(figures, hosted, world.of(rank), None, None, tasks[rank])
                for rank, hosted in enumerate(layout)
            ]
            told = [tried.result(20) for tried in tries]
        for one in told:
            assert (one["loss"], one["share"], math.isnan(one["nothing"])) == (5.5, 0.5, True)
        [outputs] = tasks[0].seen
        assert not any(task.seen for task in tasks[1:])
        assert outputs["row"].tolist() == list(range(12))
        assert outputs["even"].tolist() == [True, False] * 6
        assert outputs["pairs"].tolist() == [[float(n), -float(n)] for n in range(12)]
        assert outputs["pairs"].dtype == torch.bfloat16


class Ragged(Rows):
    """Its rows are as long as their batch has rows, in two dimensions."""

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        found = super().evaluate(model, batch)
        square = batch.long().reshape(-1, 1, 1).expand(-1, 2, len(batch))
        return {"loss": found["loss"], "row": batch.long(), "square": square, "half": square.half()}

    def summarise(self, outputs: Any) -> Any:
        self.seen.append(dict(outputs))
        return {}


def test_rows_of_unequal_length_are_padded_to_the_longest_on_any_worker() -> None:
    seen = []
    for layout in ([[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]]):
        world, tasks = Together(len(layout)), [Ragged() for _ in layout]
        with ThreadPoolExecutor(len(layout)) as members:
            tries = [
                members.submit(figures, hosted, world.of(rank), None, None, tasks[rank])
                for rank, hosted in enumerate(layout)
            ]
            for tried in tries:
                tried.result(20)
        [outputs] = tasks[0].seen
        seen.append({name: value.tolist() for name, value in outputs.items()})
        square = outputs["square"]
        assert (square.dtype, outputs["half"].dtype, square.shape[:2]) == (torch.int64, torch.float16, (12, 2))
        longest = square.shape[2]
        lengths = {int((row[0] != -100).sum()) for row in square}
        assert max(lengths) == longest > min(lengths)
        for number, row in enumerate(square.tolist()):
            assert row[0] == row[1] == [number] * row[0].count(number) + [-100] * (longest - row[0].count(number))
    assert seen[0] == seen[1] == seen[2]


def test_rows_that_cannot_hold_a_number_below_0_are_of_one_length() -> None:
    class Flags(Ragged):
        def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return {"flags": torch.ones(len(batch), len(batch), dtype=torch.bool)}

    with pytest.raises(TrainingError, match=r"values of rows for different batches: flags \(torch.bool, \(3,"):
        figures([0, 1, 2], SoloWorld(), task=Flags())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (0.5, "summarise returned float; expected a dict"),
        ({"f1": torch.zeros(2)}, r"summarise returned 'f1', of shape \(2,\), which is not a single number"),
        ({"loss": 1.0}, "both evaluate and summarise returned 'loss'"),
    ],
)
def test_an_invalid_summary_is_rejected(wrong: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        figures([0, 1, 2], SoloWorld(), task=Rows(wrong))


def test_outputs_must_agree_between_batches() -> None:
    class None_(Rows):
        def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return {"loss": batch.mean()}

    class Some(Rows):
        def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return {"row": batch.long() if len(batch) == 3 else batch}

    with pytest.raises(TrainingError, match="evaluate returned no values of rows"):
        figures([0, 1, 2], SoloWorld(), task=None_())
    with pytest.raises(TrainingError, match=r"different values of rows for different batches: row \(torch.int64"):
        figures([0, 1, 2], SoloWorld(), task=Some())


def test_the_default_evaluates_what_the_loss_returns() -> None:
    class Default(Task):
        def __init__(self, given: Any) -> None:
            self.given = given

        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return self.given(batch.mean())

    for given, names in (
        (lambda x: x, {"loss"}),
        (lambda x: {"loss": x, "metrics": {"more": 2 * x}}, {"loss", "more"}),
    ):
        assert figures([0, 1, 2], SoloWorld(), task=Default(given)) == dict.fromkeys(sorted(names), 5.5) | (
            {"more": 11.0} if "more" in names else {}
        )
        assert set(Default(given).evaluate(nn.Linear(1, 1), torch.ones(2))) == names
    with pytest.raises(TrainingError, match=r"Default\.loss returned a tuple of 2"):
        figures([0, 1, 2], SoloWorld(), task=Default(lambda x: (x, 1.0)))


class Tokens(Task):
    """Rows of some tokens, with a loss of each: the loss is the mean over the tokens of a batch."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        tokens = batch["tokens"].sum()
        return {"loss": (batch["loss"] * batch["tokens"]).sum() / tokens, "weight": tokens}


class Weighted(Tokens):
    """The same, said of an evaluation of its own, beside a value for each row."""

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        found = self.loss(model, batch)
        return {"metrics": {"loss": found["loss"], "row": batch["loss"]}, "weight": found["weight"]}


TOKENS = torch.tensor([1.0] * 7 + [99.0])
LOSSES = torch.tensor([0.0] * 7 + [1.0])


def evaluated(
    task: Task, shards: int, microbatch: int = 8, tokens: torch.Tensor = TOKENS, rules: Any = None
) -> dict[str, float]:
    """Evaluate the rows in so many shards, in microbatches of so many rows.

    `rules`: those in the state of an earlier version.
    """
    built = [Built(nn.Linear(1, 1), ())]
    state = TrainState(task, built, Summing(shards), seed=3)

    if rules is not None:
        before = state.snapshot()
        state.adopt(replace(before, values=json.dumps({**json.loads(before.values), "rules": rules}).encode()))

    def rows(shard: int) -> list[Microbatch]:
        own = [one.chunk(shards)[shard].split(microbatch) for one in (tokens, LOSSES)]
        return [Microbatch({"tokens": many, "loss": loss}, len(many)) for many, loss in zip(*own, strict=True)]

    context = StepContext(world=SoloWorld(), control=begun(), wait_s=10.0)
    return evaluate(state, whole_steps(state).passes, rows, range(shards), context, shards=shards, step=7)


@pytest.mark.parametrize(("shards", "microbatch"), [(1, 8), (8, 8), (1, 1), (2, 3)])
def test_a_batch_counts_in_an_evaluation_as_in_a_step(shards: int, microbatch: int) -> None:
    assert evaluated(Tokens(), shards, microbatch) == pytest.approx({"loss": 99 / 106})
    assert evaluated(Weighted(), shards, microbatch) == pytest.approx({"loss": 99 / 106, "row": 1 / 8})


def test_a_batch_of_weight_0_counts_nothing() -> None:
    # Its mean is not a number.
    masked = TOKENS * (TOKENS > 1)
    for shards in (1, 8):
        assert evaluated(Tokens(), shards, 1, masked) == {"loss": 1.0}
    assert math.isnan(evaluated(Tokens(), 8, 1, 0 * TOKENS)["loss"])


def test_a_run_of_an_older_version_counts_rows() -> None:
    assert evaluated(Tokens(), 8, rules={}) == {"loss": 1 / 8}
    assert evaluated(Weighted(), 8, rules={}) == pytest.approx({"loss": 99 / 106, "row": 1 / 8}), "it says so itself"


@pytest.mark.parametrize(
    ("weight", "words"),
    [(-1, "a weight of -1.0"), (math.nan, "a weight of nan"), ("many", "a weight that is not a single number")],
)
def test_a_weight_is_0_or_more(weight: Any, words: str) -> None:
    class Own(Tokens):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            return {"metrics": {"loss": 1.0}, "weight": weight}

    with pytest.raises(TrainingError, match=f"evaluate returned {words}"):
        evaluated(Own(), 1)


def test_metrics_may_have_these_names() -> None:
    class Own(Tokens):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            return {"metrics": 1.0, "weight": 2.0}

    assert evaluated(Own(), 8) == {"metrics": 1.0, "weight": 2.0}


def test_an_evaluation_is_interrupted_when_the_group_changes() -> None:
    control = begun()
    control.interrupt(0)
    with pytest.raises(Interrupted):
        figures([0, 1, 2], SoloWorld(), control=control)
