"""Word what users should know of a step. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from raytrain_plus.data.reading.microbatches import SkippedRow
from raytrain_plus.observe.expert_use import ExpertUse
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.step_records import Remark

NAMED = 5
"""Maximum number of parameters that a remark names."""
STANDING = 10
"""Consecutive steps with a learning rate of 0 after which a remark says so."""


class Remarks:
    """Makes the remarks on the steps of a generation, which come in order."""

    def __init__(self) -> None:
        self._standing = 0
        """The consecutive steps, up to the last one, with a learning rate of 0."""
        self._dropped = False
        """Whether a remark has said that a layer drops most of its tokens."""

    def of_step(
        self,
        step: int,
        lr: Sequence[float],
        absent: Collection[str],
        flushed: int,
        experts: Mapping[str, ExpertUse],
    ) -> tuple[Remark, ...]:
        """Return the remarks on a step.

        `lr`: the rates of its parameter groups. `absent`: the parameters that get no gradient, if that leaves them as
        they are. `flushed`: the values that were lost on the wire. `experts`: how each layer with experts used them.
        """
        found = []
        if step == 0 and absent:
            found.append(without_gradient(sorted(absent)))
        # The journal reports each remark once.
        if flushed:
            found.append(too_small(flushed, step))
        if experts and not self._dropped:
            layer, use = max(experts.items(), key=lambda item: item[1].dropped / item[1].choices)
            if 2 * use.dropped > use.choices:
                self._dropped = True
                found.append(mostly_dropped(layer, use))
        self._standing = self._standing + 1 if lr and not any(lr) else 0
        if self._standing == STANDING:
            found.append(standing_still(step))
        return tuple(found)


def without_gradient(names: Sequence[str]) -> Remark:
    """Return that the first step gives these parameters no gradient."""
    many = f"{len(names)} parameters" if len(names) > 1 else "the parameter"
    which = ", ".join(f"'{name}'" for name in names[:NAMED]) + ", ..." * (len(names) > NAMED)
    return Remark(
        f"absent {names[0]}",
        f"the first step gives {many} {which} no gradient; without one a parameter keeps its value. If a parameter is "
        "never to be trained, freeze it with requires_grad_(False)",
    )


def row_skipped(skipped: SkippedRow) -> Remark:
    """Return that a row is left out, and others of its file for which the cause is the same."""
    return Remark(
        f"row {skipped.file} {skipped.why}",
        f"{skipped.row} is skipped (data.on_error: skip): {skipped.why}; the same of other rows of its file is not "
        "reported",
    )


def too_small(values: int, step: int) -> Remark:
    """Return that `values` gradient values of a step were lost on a wire of 16 bits."""
    return Remark(
        "flushed",
        f"{values:,} gradient values of step {step + 1} are too small beside others to be sent in 16 bits "
        "and count as zero; later ones are not reported",
    )


def mostly_dropped(layer: str, use: ExpertUse) -> Remark:
    """Return that a layer drops most of its tokens' choices of experts."""
    return Remark(
        "mostly dropped",
        f"'{layer}' drops more than half of the choices of experts: with "
        f"capacity={use.capacity:g} an expert takes {use.capacity:g} times its even share of the tokens, and adds "
        "nothing to others; give Experts a larger capacity, such as 1.25, or None, which drops nothing; later steps "
        "and other layers are not reported",
    )


def attributes_changed(which: Sequence[str]) -> Remark:
    """Return that a step changes these attributes, named with whose they are."""
    return Remark(
        "attributes changed",
        f"a step changes {', '.join(which[:NAMED])}{', ...' * (len(which) > NAMED)}: each worker has its own, and no "
        "checkpoint has any. If more than a cache, keep it in a buffer: self.register_buffer(...)",
    )


def scaled_hooks() -> Remark:
    """Return that hooks see the gradients of losses that are scaled."""
    return Remark(
        "scaled hooks",
        "with precision: fp16 the model's hooks see gradients of the loss times its scale, as with GradScaler; limits "
        "in them, such as of clamp, mean something else than in fp32",
    )


def standing_still(step: int) -> Remark:
    """Return that the steps up to this one change no weights."""
    return Remark(
        "standing still",
        f"the learning rate is 0 in {STANDING} steps in a row, up to step {step + 1}: such steps change no weights; "
        "if the task's schedule has ended too early, give it the length of the run: self.run.total_steps",
    )


def settings_kept(which: Sequence[str]) -> Remark:
    """Return that a resumed run keeps these settings of its optimizer, in words."""
    return Remark(
        "settings kept",
        f"the optimizer keeps from the checkpoint {'; '.join(which[:NAMED])}{'; ...' * (len(which) > NAMED)}, which "
        "the task gives it now: raytrain resume RUN --fresh-rates takes the new ones",
    )


def rows_counted() -> Remark:
    """Return that the evaluations of a run do not use the weights of its loss."""
    return Remark(
        "rows counted",
        "this run was begun by an older version: as before, its evaluations count rows, not the weight that the task's "
        "loss returns",
    )


def loss_weighted() -> Remark:
    """Return that a run backpropagates its losses times their weights."""
    return Remark(
        "loss weighted",
        "this run was begun by an older version: as before, hooks and custom backward passes see gradients times the "
        "weight of their microbatch",
    )


def of_task(task: Task) -> list[Remark]:
    """Return what the task itself says of the run."""
    return [Remark(f"task {text}", text) for text in task.remarks()]


def modes_changed() -> Remark:
    """Return that a run trains in training mode what its task built in evaluation mode."""
    return Remark(
        "modes changed",
        "this run was begun by an older version: as before, it trains in training mode the modules that the task built "
        "in evaluation mode",
    )


def woken() -> Remark:
    """Return that a model that was built in evaluation mode throughout is trained in training mode."""
    return Remark(
        "woken",
        "all of the model was built in evaluation mode, as from_pretrained returns it; it is trained in training mode, "
        "with dropout and batch statistics. To keep some modules in evaluation mode, build others in training mode",
    )


def stays_in_evaluation(name: str) -> Remark:
    """Return that a module with trained parameters stays in the evaluation mode in which the task built it."""
    return Remark(
        "stays in evaluation",
        f"'{name}', and perhaps others, is trained in the evaluation mode in which the task built it: without dropout, "
        "and with the statistics that batch norms have. If that is not wanted, call its train() in model() or layers()",
    )
