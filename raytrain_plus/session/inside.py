"""The inside of a training function: what it has declared, its batch, and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent
from torch import nn
from typing_extensions import override

from raytrain_plus.errors import TaskError
from raytrain_plus.generators import set_random_key
from raytrain_plus.session.gist import gist
from raytrain_plus.session.model_marks import ValueMark, marks_of, modes_of, put_back, same
from raytrain_plus.session.standing import Standing
from raytrain_plus.session.users_line import first_line_of, users_line
from raytrain_plus.torch_compat import function_modes

_TAKEN = {
    "optimizer": "a function of (name, parameter) pairs that returns the optimizer",
    "scheduler": "a function of the optimizer that returns the scheduler",
    "evaluate": "a function of (model, batch) that returns metrics",
    "after_step": "a function of (state, metrics) that returns the next state",
}


class Inside(Iterator[Any]):
    """What a function and the run tell each other; as an iterator, the batches of its loop.

    The function holds it, so it holds no reference to the coroutine: nothing could free the two.
    """

    __slots__ = (
        "_before",
        "_code",
        "_given",
        "_key",
        "_left",
        "_locals",
        "_modes",
        "_standing",
        "batch",
        "carried",
        "declared",
        "fresh",
        "gradients",
        "loss",
        "mode",
        "module",
        "used",
    )

    def __init__(self, code: CodeType, standing: Standing, given: nn.Module | None, key: int) -> None:
        """Prepare the execution of a function of this code.

        `given`: the model that the run trains, if it exists. `key`: what the function draws from once it has the model.
        """
        self.module: nn.Module | None = None
        """The model of the function."""
        self.declared: dict[str, Callable[..., Any]] = {}
        """What it declares: the functions that are given to the session before the loop."""
        self.carried: Sequence[str] = ()
        """The names of local variables that the first batch has left with another value."""
        self.used = 0
        """The number of batches that the function has asked for."""
        self.batch: Any = None
        self.loss: dict[str, Any] | None = None
        """What `Task.loss` returns for the batch; None before the function has called `step`."""
        self.fresh = True
        """Whether no batch has passed, so that a mistake may still be seen for the first time."""
        self.mode = thread_mode()
        """That of the run, where it has resumed the function while this was `fresh`."""
        self.gradients = True
        """Whether the run records gradients, where it has resumed the function."""
        self._code, self._standing, self._given, self._key = code, standing, given, key
        self._left = False
        """Whether the function was left, so that only its `finally` blocks are to run."""
        self._before: Mapping[str, ValueMark] = {}
        """The values of the model, as the function got it."""
        self._locals: Mapping[str, Any] = {}
        self._modes: Sequence[tuple[nn.Module, bool]] = ()
        """Whether the run has set each module to training for this batch; empty if it is not compared."""

    def take_model(self, build: Callable[[], nn.Module]) -> nn.Module:
        """See `Session.model`."""
        if self.module is not None:
            raise TaskError(
                f"{self._code.co_name} calls session.model twice, and a run trains one model",
                where=users_line(),
                remedy="put both models into one nn.Module",
            )
        self._check_before_loop("model")
        if isinstance(build, nn.Module) or not callable(build):
            raise TaskError(
                f"session.model was given a {type(build).__name__}",
                where=users_line(),
                expected="a function that returns the model: each worker builds its own under the run's random keys",
            )
        if self._given is None:
            built = build()
            if not isinstance(built, nn.Module):
                raise TaskError(
                    f"session.model: the function returned {type(built).__name__}",
                    where=users_line(),
                    expected="a torch.nn.Module",
                )
            self.module = built
        else:
            self.module = self._given
            # The run sets them; a model is built with those that the function leaves it in the first time.
            self._modes = modes_of(self.module)
        self._before = marks_of(self.module)
        set_random_key(self._key)
        return self.module

    def declare(self, what: str, function: Callable[..., Any]) -> None:
        """Take the function that is given to this method of the session."""
        self._check_before_loop(what)
        if what in self.declared:
            raise TaskError(f"{self._code.co_name} calls session.{what} twice", where=users_line(), expected="one call")
        if not callable(function):
            raise TaskError(
                f"session.{what} was given a {type(function).__name__}",
                where=users_line(),
                expected=_TAKEN[what],
            )
        self.declared[what] = function

    def _check_before_loop(self, what: str) -> None:
        if self.used:
            raise TaskError(
                f"session.{what} is called inside the loop",
                where=users_line(),
                remedy=f"call session.{what} before the loop",
            )

    def take_loss(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, metrics: Mapping[str, Any] | None
    ) -> None:
        """See `Session.step`."""
        if not self.used:
            raise TaskError(
                "session.step is called outside the loop",
                where=users_line(),
                expected="for batch in session.batches(): ...",
            )
        if self.loss is not None:
            raise TaskError(
                "session.step is called twice for one batch",
                where=users_line(),
                expected="one loss, the sum of all parts",
                remedy="call session.step(first + second)",
            )
        self._check_modes()
        self.loss = {"loss": loss}
        if weight is not None:
            self.loss["weight"] = weight
        if metrics is not None:
            self.loss["metrics"] = metrics

    def note_modes(self) -> None:
        """Have the modes of the modules compared with these while the function has its batch.

        Only for its first batch, and for held-out ones, which a loop that sets modes would measure with dropout.
        """
        assert self.module is not None, "the function waits for a batch"
        self._modes = modes_of(self.module) if self.fresh or self._standing.held_out else ()

    def _check_modes(self) -> None:
        """Raise `TaskError`, with the modes put back, if the function has changed one."""
        if put_back(self._modes):
            raise TaskError(
                "the loop sets the mode of the model",
                where=users_line(),
                remedy="leave out model.train() and model.eval(): the run sets the mode, and held-out batches pass "
                "through the loop unless session.evaluate has a function for them",
            )

    def standing(self, what: str) -> Standing:
        """Return where the run stands. Raises `TaskError` before the loop."""
        if not self.used:
            raise TaskError(
                f"session.{what} is not known before the loop",
                where=users_line(),
                remedy=f"read session.{what} in the loop, or in what session.optimizer and session.scheduler are given",
            )
        return self._standing

    @override
    def __next__(self) -> Any:
        parent = getcurrent().parent
        if parent is None:
            raise TaskError(
                f"{self._code.co_name} takes a batch on a thread of its own",
                where=users_line(),
                remedy="take batches on the thread that runs the function; the run itself reads them ahead",
            )
        if self._left:
            # It has caught its own end. Any error now, it would catch again, without end.
            parent.switch()
        if self.module is None:
            raise TaskError(
                f"{self._code.co_name} takes a batch before it has a model",
                where=users_line(),
                remedy="call model = session.model(build) before the loop",
            )
        if self.used and self.loss is None:
            raise TaskError(
                "the loop takes the next batch, and gave no loss of this one",
                where=users_line(),
                remedy="call session.step(loss) for each batch; a batch without a part in the loss has weight=0",
            )
        if self.used:
            self._check_modes()
        if self.gradients != torch.is_grad_enabled() or (self.fresh and self.mode != thread_mode()):
            torch.set_grad_enabled(self.gradients)
            raise TaskError(
                "the loop stands in a context of torch, such as autocast, no_grad or a device, and the run with it",
                where=users_line(),
                remedy="open it in the body of the loop; for autocast, set precision in the job",
            )
        if self.fresh:
            self._check_outset()
        self.used += 1
        try:
            parent.switch()
        except GreenletExit:
            self._left = True
            raise
        batch, self.batch = self.batch, None
        return batch

    def _check_outset(self) -> None:
        """Check what the function has done before its loop, and with its first batch."""
        assert self.module is not None, "it was checked"
        if not self.used:
            put_back(self._modes)
            self._check_unchanged(self.module)
        apart = {id(value) for value in (*self.module.parameters(), *self.module.buffers())}
        frame = self._frame()
        held = (
            {}
            if frame is None
            else {name: gist(value, apart, frame.f_globals["__name__"]) for name, value in frame.f_locals.items()}
        )
        if self.used:
            self.fresh = False
            self.carried = sorted(name for name, gist in self._locals.items() if held.get(name) != gist)
        self._locals = held

    def _check_unchanged(self, module: nn.Module) -> None:
        """Raise `TaskError` if the function has changed the model before its loop.

        It would do so to trained weights when it begins again. Freezing weights once more changes none.
        """
        before, self._before = self._before, {}
        now = marks_of(module)
        again = self._given is not None
        changed = [name for name in {**before, **now} if not same(before.get(name), now.get(name), again)]
        if changed:
            raise TaskError(
                f"{self._code.co_name} changes '{changed[0]}' of the model after session.model",
                where=first_line_of(self._code),
                remedy="do so in the function that is given to session.model, which builds the model; what precedes "
                "the loop is executed again with trained weights",
            )

    def _frame(self) -> FrameType | None:
        """Return the function's frame, which calls this."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame


def thread_mode() -> tuple[int, ...]:
    """Return what torch keeps for each thread, beside gradients, and a context may change."""
    autocast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return torch.is_inference_mode_enabled(), function_modes(), *autocast
