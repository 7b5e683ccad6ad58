"""Define `Session`, which a training function is given.

def main(session):
    model = session.model(build)
    optimizer = session.optimizer(lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-3))
    for batch in session.batches():
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        session.step(loss)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.session.plain_values import copied
from raytrain_plus.session.users_line import users_line

if TYPE_CHECKING:
    from raytrain_plus.session.inside import Inside

Named = Iterable[tuple[str, nn.Parameter]]


class Session:
    """What a training function says of its model and its losses, and what it sees of the run.

    All but `batches`, `step`, `stop` and the properties is called before the loop, once.
    """

    __slots__ = ("_inside",)

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def model(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that the run trains, which `build` returns freshly initialised on the CPU.

        `build` does all that makes the model, such as to load or to freeze weights: see `Task.model`. What precedes the
        loop is executed again after an error, so it must not change the model.
        """
        return self._inside.take_model(build)

    def optimizer(self, make: Callable[[Named], torch.optim.Optimizer]) -> Stepped:
        """Have `make` return the optimizer for (name, parameter) pairs. Without this call it is AdamW, at 1e-3.

        The run makes its steps, so what is returned here only says so if it is used.
        """
        self._inside.declare("optimizer", make)
        return Stepped("optimizer")

    def scheduler(self, make: Callable[[torch.optim.Optimizer], Any]) -> Stepped:
        """Have `make` return the learning-rate scheduler of the optimizer; the run steps it once a step."""
        self._inside.declare("scheduler", make)
        return Stepped("scheduler")

    def evaluate(self, metrics: Callable[[nn.Module, Any], Mapping[str, Any]]) -> None:
        """Have `metrics` return those of (model, held-out batch), as `Task.evaluate` does.

        Without this call held-out batches pass through the loop, and the metrics are its own.
        """
        self._inside.declare("evaluate", metrics)

    def after_step(self, keep: Callable[[dict[str, Any], Mapping[str, float]], Mapping[str, Any]]) -> None:
        """Have `keep` return the next `state`, given the one before and the means of the step: `loss` and the metrics.

        It is called on each worker once a step is made, and must depend on nothing else: then the state is the same on
        all workers. It is a small mapping of JSON, which checkpoints and workers that join get, too.
        """
        self._inside.declare("after_step", keep)

    def batches(self) -> Iterator[Any]:
        """Return the endless batches of the loop, each a microbatch of one shard."""
        return self._inside

    def step(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Give the mean loss of the batch, once for each: see `Task.loss` for `weight` and `metrics`.

        The run computes the gradients when the loop takes the next batch.
        """
        self._inside.take_loss(loss, weight, metrics)

    def stop(self) -> None:
        """Ask the run to stop after this step, or one soon after, as `raytrain stop` does; its last state is saved.

        For a held-out batch it does nothing: the next training batch comes to the same line.
        """
        standing = self._inside.standing("stop")
        standing.stops = standing.stops or not standing.held_out

    @property
    def state(self) -> dict[str, Any]:
        """A copy of what `after_step` has returned after the step before this one; empty before the first."""
        return copied(self._inside.standing("state").remembered)

    @property
    def steps(self) -> int:
        """The steps that the run has made before this batch."""
        return self._inside.standing("steps").steps

    @property
    def epoch(self) -> int:
        """The epoch in which this step begins, counted from 0."""
        standing = self._inside.standing("epoch")
        return standing.steps * standing.facts.batch_size // max(1, standing.facts.rows)

    @property
    def total_steps(self) -> int:
        """The steps of the whole run; also known to what makes the optimizer and the scheduler."""
        return self._inside.standing("total_steps").facts.total_steps


class Stepped:
    """Stands for an optimizer or a scheduler, which the run steps."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Such as those that pickling looks for.
            raise AttributeError(name)
        raise TaskError(
            f"the loop uses {self._what}.{name}, and the run itself makes the backward pass and steps the {self._what}",
            where=users_line(),
            remedy=f"leave out {self._what}.{name}; session.step(loss) is all that a batch needs",
        )
