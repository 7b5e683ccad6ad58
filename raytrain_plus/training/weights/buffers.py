"""Model buffers (such as BatchNorm's running statistics) over shards.

Every shard of a step starts from the committed buffers. Afterwards a floating-point buffer becomes the mean over
shards, weighted by rows; an integer buffer becomes the maximum. The task can choose other rules, as can a module for
integers that are sums (`summed_buffers`). So the result does not depend on which worker hosted which shard. A module
may then change its buffers once more, from what all shards have left in them (`StepModule`).

Buffers that are not persistent, such as masks, may take another shape in a forward pass. From then on they are the
module's own here (`transient`); in the state, they stay as they were built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Operation
from raytrain_plus.device_copies import Numbers, read_together
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.step_modules import RoutingModule, StepModule, step_modules
from raytrain_plus.task import BufferRule, Task
from raytrain_plus.torch_compat import buffer_of, copy_each, put_buffer

_CPU = torch.device("cpu")


class Buffers:
    """The committed buffers of a model, and the sums that become the next committed buffers."""

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        exact_shards: int | None = None,
        label: str = "",
        device: torch.device = _CPU,
    ) -> None:
        """With `exact_shards`, the job's number of shards, means do not depend on the order of addition.

        `label` separates these sums from those of other parts of the model. `device`: where they are, also if the
        model has no buffers.
        """
        self._label = label
        self._named = dict(module.named_buffers())
        first = {id(buffer): name for name, buffer in self._named.items()}
        self._slots = [
            (first[id(buffer)], module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, buffer in module.named_buffers(remove_duplicate=False)
        ]
        """Every place in the model that holds a buffer; several modules can share one."""
        self._owners = {name: (owner, attribute) for name, owner, attribute in reversed(self._slots)}
        """The first place of each buffer."""
        saved = module.state_dict(keep_vars=True).keys()
        self._transient = [place for place, (name, _, _) in enumerate(self._slots) if name not in saved]
        """The places of the buffers that are not persistent."""
        self._may_grow = frozenset(self._slots[place][0] for place in self._transient)
        self._stepping = step_modules(module)
        self._changed_at_end = [name for name in self._named if name.rpartition(".")[0] in self._stepping]
        """The buffers of these modules."""
        self._rules = {name: _rule(task, name, buffer, *self._owners[name]) for name, buffer in self._named.items()}
        self.committed = {name: buffer.detach().clone() for name, buffer in self._named.items()}
        means, greatest = self._sizes("mean"), self._sizes("max")
        self._averaged, self._greatest = tuple(means), tuple(greatest)
        # A step that would make a value infinite or NaN is refused, so what is finite now stays so.
        self._all_finite = all(bool(self._named[name].isfinite().all()) for name in means)
        added = self._sizes("sum")
        self._added = tuple(added)
        self._others = tuple(name for name in self._named if name not in {*means, *greatest, *added})
        firsts = {name: size for name, size in self._sizes("first").items() if self._named[name].is_floating_point()}
        # An integer buffer that only one shard writes also uses the maximum: the other shards contribute the smallest
        # number.
        largest = greatest | {name: size for name, size in self._sizes("first").items() if name not in firsts}
        self._firsts = tuple(firsts)
        # Whole numbers add up to the same in any order.
        firsts |= added
        self.exact = ExactSum(means, exact_shards, device, sum(firsts.values())) if exact_shards and means else None
        if self.exact is None:
            self._flat = torch.zeros(sum(means.values()) + sum(firsts.values()), dtype=torch.float64, device=device)
            parts: Sequence[torch.Tensor] = self._flat.split([*means.values(), *firsts.values()])
        else:
            self._flat = self.exact.wire
            parts = [*self.exact.sums, *self.exact.rider.split(list(firsts.values()))]
        self._means = self._flat[: sum(means.values()) if self.exact is None else 0]
        """The sums that become means. Exact sums report themselves whether they are finite."""
        self._before = self._means
        """The committed values of the buffers that are averaged."""
        self._maxima = torch.zeros(sum(largest.values()), dtype=torch.int64, device=device)
        self._of_max = self._maxima[: sum(greatest.values())]
        """Those of the buffers with the rule `max`."""
        self._sums = dict(zip((*means, *firsts), parts, strict=True))
        self._sums |= dict(zip(largest, self._maxima.split(list(largest.values())), strict=True))
        self._changed: list[tuple[str, Numbers]] = []
        """Of the buffers that must not change, whether each did in a shard."""

    def _sizes(self, rule: BufferRule) -> dict[str, int]:
        return {name: buffer.numel() for name, buffer in self._named.items() if self._rules[name] == rule}

    def begin_step(self, scales: Mapping[str, int], loss_factor: float = 1.0) -> None:
        """Clear the sums of the last step.

        `scales`: the exponents of the quanta of an exact sum. `loss_factor`: by what losses are multiplied.
        """
        for one in self._stepping.values():
            one.begin_step(loss_factor)
        self._flat.zero_()
        self._maxima.fill_(torch.iinfo(torch.int64).min)
        self._changed.clear()
        if self.exact is not None:
            self.exact.begin(scales)
        if self._averaged:
            self._before = _joined([self.committed[name] for name in self._averaged], torch.float64)

    def restore(self) -> None:
        """Put the committed values into the model."""
        with torch.no_grad():
            copy_each(list(self._named.values()), [self.committed[name] for name in self._named])
        # A forward pass may have put other tensors in their places.
        self._put(self._own_or([self._named[name] for name, _, _ in self._slots]))

    def renew(self, committed: bool) -> None:
        """Put fresh tensors into the model that hold the committed values, or else the present values.

        The previous tensors stay unchanged for backward passes that are still to come.
        """
        self._put(
            _copied(self._own_or([self.committed[name] for name, _, _ in self._slots]) if committed else self.seen())
        )

    def _own_or(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return these values, but for buffers that have become the module's own what is there."""
        found: list[torch.Tensor | None] = list(values)
        for place in self._transient:
            name, owner, attribute = self._slots[place]
            seen = buffer_of(owner, attribute)
            if seen is None or seen.shape != self.committed[name].shape:
                found[place] = seen
        return found

    def seen(self) -> list[torch.Tensor | None]:
        """Return the tensors that are in the model now."""
        return [buffer_of(owner, attribute) for _, owner, attribute in self._slots]

    @contextlib.contextmanager
    def swapped(self, seen: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Put the values of `seen` into the model while the context is open.

        For a backward pass, which may recompute parts of its forward pass. Changes made meanwhile are discarded.
        """
        present = self.seen()
        self._put(_copied(seen))
        try:
            yield
        finally:
            self._put(present)

    def _put(self, values: Sequence[torch.Tensor | None]) -> None:
        for (_, owner, attribute), value in zip(self._slots, values, strict=True):
            put_buffer(owner, attribute, value)

    def end_shard(self, shard: int, rows: int) -> None:
        """Add the values that the shard's forward passes left in the buffers."""
        now: dict[str, torch.Tensor] = {}
        for name, (owner, attribute) in self._owners.items():
            buffer = buffer_of(owner, attribute)
            if buffer is None or buffer.shape != self.committed[name].shape:
                if name not in self._may_grow:
                    raise TrainingError(f"the buffer '{name}' was removed or reshaped in a forward pass")
                # It is the module's own now, and counts as unchanged.
                buffer = self.committed[name]
            now[name] = buffer
        with torch.no_grad():
            # Each operation handles all buffers of a rule: a model can have a hundred small ones.
            if self._averaged:
                after, before = _joined([now[name] for name in self._averaged], torch.float64), self._before
                if self._all_finite:
                    change = after.sub_(before).mul_(rows)
                else:
                    # A value that stays the same (for example in a mask with infinities) is not touched.
                    same = (after == before) | (after.isnan() & before.isnan())
                    change = torch.where(same, 0.0, after.sub_(before)).mul_(rows)
                if self.exact is None:
                    self._means.add_(change)
                else:
                    self.exact.add(change.split([now[name].numel() for name in self._averaged]))
            if self._greatest:
                joined = _joined([now[name] for name in self._greatest], torch.int64)
                torch.maximum(self._of_max, joined, out=self._of_max)
            for name in self._added:
                self._sums[name].add_((now[name] - self.committed[name]).reshape(-1))
            for name in self._others:
                if self._rules[name] == "refuse":
                    self._changed.append((name, Numbers(~_equal(now[name], self.committed[name]))))
                elif shard == 0:
                    # Other shards add zeros, which turn -0.0 into 0.0; a single shard must give the same.
                    self._sums[name].copy_(now[name].reshape(-1)).add_(0)

    def routed(self) -> dict[str, tuple[RoutingModule, Numbers]]:
        """Return the routers by name, with what they have counted in the step whose sums are complete."""
        found = {name: one for name, one in self._stepping.items() if isinstance(one, RoutingModule)}
        return {name: (one, Numbers(self._sums[f"{name}.tally".lstrip(".")])) for name, one in found.items()}

    @property
    def unread(self) -> list[Numbers]:
        """What `check_refused` reads."""
        return [changed for _, changed in self._changed]

    def check_refused(self) -> None:
        """Raise `TrainingError` if a buffer whose rule is 'refuse' has changed in a shard of this step."""
        read_together(self.unread)
        for name, changed in self._changed:
            if any(changed.values()):
                raise TrainingError(f"the buffer '{name}' changed in a forward pass, but its rule is 'refuse'")

    def check_unchanged(self) -> None:
        """Raise `TrainingError` if a buffer has changed, in steps that must leave all of them unchanged."""
        found: list[tuple[str, Numbers]] = []
        for name, (owner, attribute) in self._owners.items():
            buffer = buffer_of(owner, attribute)
            if buffer is None or buffer.shape != self.committed[name].shape:
                if name not in self._may_grow:
                    raise _changed_in_pipedream(name)
                continue
            found.append((name, Numbers(_equal(buffer, self.committed[name]))))
        read_together(same for _, same in found)
        for name, same in found:
            if not all(same.values()):
                raise _changed_in_pipedream(name)

    @property
    def words(self) -> int:
        """The number of 64-bit words of `own`."""
        return len(self._flat) + len(self._maxima)

    def own(self) -> torch.Tensor:
        """Return the sums and maxima over the shards hosted here, as int64 words that stand for any numbers."""
        return torch.cat([self._flat.view(torch.int64), self._maxima])

    def combine(self, words: torch.Tensor) -> None:
        """Take the sums and maxima over all members, given `own` of each, a row a member, in the order of ranks."""
        sums, maxima = words.split([len(self._flat), len(self._maxima)], dim=1)
        self._flat.zero_()
        for row in sums:
            self._flat += row.contiguous().view(torch.float64)
        if len(self._maxima):
            torch.amax(maxima, 0, out=self._maxima)

    def to_reduce(self) -> Iterator[tuple[torch.Tensor, str, Operation]]:
        """Yield (vector, name, operation) for each vector to reduce over workers in place."""
        if len(self._flat):
            yield self._flat, f"buffers{self._label}.sum", "sum"
        if len(self._maxima):
            yield self._maxima, f"buffers{self._label}.max", "max"

    def changes(self) -> list[torch.Tensor]:
        """Return tensors that contain NaN or infinity if a buffer would not be finite
        after the step, but was before.
        """
        return [self._means, *(self._wrong(name) for name in self._firsts)]

    def not_finite(self) -> list[str]:
        """Return the names of the buffers that were finite and would not be finite after the step."""
        means = [name for name, rule in self._rules.items() if rule == "mean"]
        found = [name for name in means if not bool(self._sums[name].isfinite().all())]
        return found + [name for name in self._firsts if not bool(self._wrong(name).isfinite().all())]

    def _wrong(self, name: str) -> torch.Tensor:
        """Return the values of a buffer written by one shard, with zero for values that are finite or were not finite
        before.
        """
        value, before = self._sums[name], self.committed[name].reshape(-1)
        return torch.where(value.isfinite() | ~before.isfinite(), 0.0, value)

    def commit(self, rows: int) -> None:
        """Make the reduced values the committed ones and put them into the model. `rows`: rows of the whole step."""
        with torch.no_grad():
            if self._averaged:
                # One operation handles all numbers; a float32 buffer is added to in float64, and rounded once.
                means = _joined([self._sums[name] for name in self._averaged], torch.float64).div_(rows)
                means = means.add_(_joined([self.committed[name] for name in self._averaged], torch.float64))
                sizes = [self.committed[name].numel() for name in self._averaged]
                new = dict(zip(self._averaged, means.split(sizes), strict=True))
            else:
                new = {}
            new |= {name: self._sums[name] + self.committed[name].reshape(-1) for name in self._added}
            changed = [name for name in self._named if name in self._sums]
            copy_each(
                [self.committed[name] for name in changed],
                [new.get(name, self._sums[name]).reshape(self.committed[name].shape) for name in changed],
            )
        self.restore()
        with torch.no_grad():
            for one in self._stepping.values():
                one.end_step()
            for name in self._changed_at_end:
                self.committed[name].copy_(self._named[name])


def _joined(values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return all numbers in one new vector."""
    return torch.cat([value if value.dim() == 1 else value.reshape(-1) for value in values]).to(dtype)


def _copied(values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copy the tensors; a tensor that occurs twice is copied once."""
    given = {id(value): value for value in values if value is not None}
    copies = {key: torch.empty_like(value) for key, value in given.items()}
    with torch.no_grad():
        copy_each(list(copies.values()), [value.detach() for value in given.values()])
    return [None if value is None else copies[id(value)] for value in values]


def _changed_in_pipedream(name: str) -> TrainingError:
    return TrainingError(f"the buffer '{name}' changed in a forward pass; pipedream does not allow that")


def _rule(task: Task, name: str, buffer: torch.Tensor, owner: nn.Module, attribute: str) -> BufferRule:
    default: BufferRule = "mean" if buffer.is_floating_point() else "refuse" if buffer.is_complex() else "max"
    summed = isinstance(owner, StepModule) and attribute in owner.summed_buffers
    if summed:
        default = "sum"
    rule = default if summed else task.buffer_rule(name) or default
    if buffer.is_complex() and rule != "refuse":
        raise TaskError(
            f"buffer_rule('{name}') returned '{rule}' for a complex buffer",
            expected="'refuse'",
            remedy="if it changes, keep its real and imaginary parts in separate buffers",
        )
    if rule in ("max", "sum") and buffer.is_floating_point():
        raise TaskError(
            f"buffer_rule('{name}') returned '{rule}' for a floating-point buffer",
            expected="'mean', 'first' or 'refuse'",
        )
    if rule == "mean" and not buffer.is_floating_point():
        raise TaskError(
            f"buffer_rule('{name}') returned 'mean' for {buffer.dtype}", expected="'max', 'sum', 'first' or 'refuse'"
        )
    return rule


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether the values are the same, as one value; NaN counts as equal to NaN."""
    return ((one == other) | (one.isnan() & other.isnan())).all()
