"""The task of a training function with a loop of its own: `task: module:main` in a job."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from raytrain_plus.errors import TaskError, listed
from raytrain_plus.generators import seeded
from raytrain_plus.session.course import Course
from raytrain_plus.session.plain_values import copied, plain_values
from raytrain_plus.session.standing import Standing
from raytrain_plus.session.unreached import unreached_line
from raytrain_plus.task import Task

_CALLS = {"optimizer": "optimizer", "scheduler": "scheduler", "evaluate": "evaluate", "remembered": "after_step"}
"""By the methods of the task that call what a function has declared: the methods of the session that took it."""


class SessionTask(Task):
    """Gives the function's loop one batch at a time, and takes the loss."""

    function: ClassVar[Callable[..., Any]]

    def __init__(self, /, **arguments: Any) -> None:
        """Take the job's `args`, which the function gets after the session.

        Raises `TypeError` if the function cannot be called with them.
        """
        try:
            inspect.signature(self.function).bind(None, **arguments)
        except TypeError as error:
            # Without the frames of the standard library.
            raise TypeError(str(error)) from None
        self._arguments, self._standing = arguments, Standing()
        self._course: Course | None = None
        """The last execution of the function. There is another for each model, and after an error."""
        self._key: int | None = None
        """From which each execution draws up to its loop: that under which the run has the model built."""

    def model(self) -> nn.Module:
        """See `Task`: the model of the function, which is executed up to its loop."""
        module = self._begun(None).inside.module
        assert module is not None, "the function is at its loop"
        return module

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """See `Task`: what the function has declared."""
        make = self._declared("optimizer")
        if make is None:
            return super().optimizer(parameters)
        found: torch.optim.Optimizer = make(list(parameters))
        return found

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """See `Task`: what the function has declared."""
        make = self._declared("scheduler")
        return None if make is None else make(optimizer)

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what the loop gives to `session.step` for this batch."""
        return self._at_loop(model).loss_of(batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what the function has declared; without it the loss and the metrics of its loop."""
        metrics = self._declared("evaluate")
        self._standing.held_out = True
        try:
            if metrics is not None:
                found: Mapping[str, Any] = metrics(model, batch)
                return found
            given = self._at_loop(model).loss_of(batch)
        finally:
            self._standing.held_out = False
        means = {"loss": given["loss"], **given.get("metrics", {})}
        return {"metrics": means, "weight": given["weight"]} if "weight" in given else means

    def remarks(self) -> Sequence[str]:
        """See `Task`: what of the function is not executed, and what it keeps between batches."""
        line = unreached_line(self.function)
        name = self.function.__name__
        found = []
        if line is not None:
            found.append(
                f"line {line}, behind the loop of {name}, is not executed: a loop ends with its run alone; raytrain "
                "export writes the model, and session.evaluate has the metrics of held-out rows"
            )
        carried = () if self._course is None else self._course.inside.carried
        if carried:
            found.append(
                f"a batch changes {listed(carried)} of {name}: each worker has its own, one that joins later none, and "
                "batches may be shown again; give session.step metrics, or keep session.state by session.after_step"
            )
        return found

    def remembers(self) -> bool:
        """See `training.exchange.stepwise.Stepwise`: whether the function has said what it keeps of a step."""
        return self._declared("after_step") is not None

    def begin_step(self, step: int, remembered: Mapping[str, Any]) -> None:
        """See `training.exchange.stepwise.Stepwise`."""
        self._learn_facts()
        self._standing.steps, self._standing.remembered, self._standing.stops = step, remembered, False

    def remembered(self, before: Mapping[str, Any], metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """See `training.exchange.stepwise.Stepwise`: what the function makes of it."""
        after_step = self._declared("after_step")
        return {} if after_step is None else plain_values(after_step(copied(before), metrics))

    def stops(self) -> bool:
        """See `training.exchange.stepwise.Stepwise`."""
        return self._standing.stops

    def _declared(self, what: Literal["optimizer", "scheduler", "evaluate", "after_step"]) -> Callable[..., Any] | None:
        if self._course is None:
            self._begun(None)
        assert self._course is not None, "it has begun"
        self._learn_facts()
        return self._course.inside.declared.get(what)

    def _learn_facts(self) -> None:
        if "run" in vars(self):
            self._standing.facts = self.run

    def _at_loop(self, model: nn.Module) -> Course:
        """Return the execution that waits for a batch of this model: of another model, or after an error, a new one."""
        course = self._course
        return course if course is not None and course.trains(model) else self._begun(model)

    def _begun(self, model: nn.Module | None) -> Course:
        self._learn_facts()
        # The function that waits is left first: it may hold a model of the same size.
        self._course = None
        if self._key is None:
            self._key = torch.initial_seed()
        # It may begin within a step, whose own numbers it leaves alone.
        with seeded(self._key):
            self._course = Course(self.function, self._arguments, self._standing, model, _after_model(self._key))
        return self._course


def _after_model(key: int) -> int:
    """Return the key of what is drawn after `session.model`, which builds a model the first time only."""
    return (key + 1) % 2**64


def session_task(function: FunctionType) -> type[SessionTask]:
    """Return the task of a training function. Raises `TaskError` for a function that cannot be one."""
    name = f"{function.__module__}:{function.__qualname__}"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TaskError(
            f"{name} is a generator or async",
            where="task",
            expected="a plain function: def main(session): ... for batch in session.batches(): ... session.step(loss)",
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TaskError(
            f"{name} takes no session", where="task", expected=f"def {function.__name__}(session), or a class"
        )
    if parameters[0].name == "self":
        raise TaskError(
            f"{name} is a method, and there is no object of its class",
            where="task",
            expected=f"a plain function, def {function.__name__}(session), or a staticmethod",
        )
    unnamed = [one.name for one in parameters[1:] if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    if unnamed:
        raise TaskError(
            f"{name} takes '{unnamed[0]}' by its position alone, and the job gives its args by name",
            where="task",
            remedy="leave out the slash of the signature",
        )
    # What a job gives as `args` is compared with the signature of its task.
    rest = inspect.Signature(parameters[1:])
    values = {
        "function": staticmethod(function),
        "__signature__": rest,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    return type(function.__name__, (SessionTask,), values)


def declared_in(error: BaseException) -> str:
    """Return the method of the session whose function has raised the error, or cannot be called; empty if none has."""
    folder = os.path.dirname(__file__)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(folder)]
    return _CALLS.get(frames[-1].name, "") if frames and frames[-1].filename == __file__ else ""
