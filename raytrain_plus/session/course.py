"""One execution of a training function: a coroutine that is left while it waits for its next batch.

It is a greenlet of the thread that calls it, so that what torch keeps for each thread (autocast, gradients on or off)
holds in the function as around it. While the function waits, its frame is not on the stack: an interrupt of the run
never passes through it.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.session.inside import Inside, thread_mode
from raytrain_plus.session.session import Session
from raytrain_plus.session.standing import Standing
from raytrain_plus.session.users_line import first_line_of, users_line


class Course:
    """A training function, which waits for a batch of its model; left for good, its `finally` blocks run."""

    # Without a dict of attributes, in which a trial would look for what a step changes.
    __slots__ = ("_function", "_greenlet", "_thread", "inside")

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        standing: Standing,
        module: nn.Module | None,
        key: int,
    ) -> None:
        """Run the function up to its loop.

        `module`: the model that the run trains; None to have it built. `key`: what the function draws from once it has
        the model.

        Raises `TaskError` for what a function may not do, and what the function raises.
        """
        self._function = function
        self._thread = threading.get_ident()
        self.inside = inside = Inside(function.__code__, standing, module, key)
        self._greenlet = greenlet(lambda: function(Session(inside), **arguments))
        self._greenlet.gr_context = contextvars.copy_context()
        self._resume()

    def trains(self, model: nn.Module) -> bool:
        """Return whether the function waits, on this thread, for a batch of this model."""
        waits = self._thread == threading.get_ident() and not self._greenlet.dead
        return waits and self.inside.module is model

    def loss_of(self, batch: Any) -> dict[str, Any]:
        """Return what the function makes of a batch, as `Task.loss` does."""
        inside = self.inside
        inside.batch, inside.loss = batch, None
        inside.note_modes()
        watched = self._watched() if inside.fresh and torch.is_grad_enabled() else []
        try:
            self._resume()
        finally:
            for handle in watched:
                handle.remove()
        found, inside.loss = inside.loss, None
        assert found is not None, "it was checked when the function asked for the next batch"
        return found

    def _resume(self) -> None:
        """Run the function on until it waits for a batch."""
        inside = self.inside
        self._greenlet.parent = getcurrent()
        inside.gradients = torch.is_grad_enabled()
        if inside.fresh:
            inside.mode = thread_mode()
        self._greenlet.switch()
        if self._greenlet.dead:
            raise self._ended()

    def _ended(self) -> TaskError:
        """Return the error that the function has ended."""
        name, where = self._function.__name__, first_line_of(self._function.__code__)
        if not self.inside.used:
            return TaskError(
                f"{name} returned before it took a batch",
                where=where,
                expected="a loop: for batch in session.batches(): ... session.step(loss)",
            )
        return TaskError(
            f"{name} left its loop, and a loop ends with its run alone",
            where=where,
            expected="a loop without break and return, in one piece: epochs are a setting of the job",
            remedy="set steps, epochs or early_stop in the job, or call session.stop()",
        )

    def _watched(self) -> list[Any]:
        """Have a backward pass of the function refused; return the handles of the hooks that do so."""
        assert self.inside.module is not None, "the function waits for a batch"
        trained = (value for value in self.inside.module.parameters() if value.requires_grad)
        return [value.register_post_accumulate_grad_hook(self._refuse_backward) for value in trained]

    def _refuse_backward(self, _: torch.Tensor) -> None:
        raise TaskError(
            "the loop makes a backward pass, and the run makes one of each loss",
            where=users_line(),
            remedy="leave out loss.backward(); session.step(loss) is all that a batch needs",
        )
