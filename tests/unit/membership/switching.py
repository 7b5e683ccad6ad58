"""A member that switches from the host's sums to NCCL's, replayed from the history of what has happened to it.

A member runs the real loop of training, `NcclWorld`, and the real headers. Whatever it waits for - a batch, a sum, a
note of another stage - comes from its history; at the end of the history it stops, and says what it waits for. So a
member is a function of its history, and an explorer can continue each of its moments in every way, without threads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from raytrain_plus.collective.nccl import ID_BYTES
from raytrain_plus.collective.nccl_forming import NAME
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import FixedTransport, World
from raytrain_plus.data.reading.microbatches import StepBatches
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.header import Flags, ShardReport, decode, either, encode
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.step.loop import LEFT, Companions, Span, StepTimeouts, train
from raytrain_plus.training.weights.first_bucket import from_digits, to_digits
from tests.unit.membership.explorer import Violation

SHARDS = 6
WINDOW = 2
"""The number of steps that overlapping stages commit together."""
Entry = Any
"""What has happened to a member: "ready" or "failed" of its NCCL, "pause", "begin" of a step, "state" if it has the
state, or what it has waited for: the bytes of a sum, or a note."""


class Seat(NamedTuple):
    """A member's place, and the steps that it is to make."""

    mark: int
    """Tells the ids of NCCL of consecutive generations apart."""
    rank: int
    size: int
    first: int
    end: int
    lacks: bool = False
    """It takes the state from others."""
    stage: int = -1
    """Its stage of two, of overlapping steps; -1 if it has the whole model."""


class Moment(NamedTuple):
    """Where a member is. Nothing else decides what it will do."""

    seat: Seat
    waits: str
    """What it waits for: "sum", "begin", "state", "note"; "over" if it has returned."""
    what: str = ""
    """The name of the sum or note; why it has returned."""
    way: str = ""
    """How the sum goes: "host", or "nccl" with the mark of its communicator."""
    given: bytes = b""
    """Its part of that sum."""
    nccl: str = ""
    """Its NCCL: "forming", "ready" or "failed"; empty before it has the id."""
    ways: str = ""
    """How its sums have gone so far, one letter each, that which it waits for included."""
    heard: str = ""
    """For each committed boundary, whether some member was forming ("f") or all were ready ("r")."""
    applied: int = -1
    unready: bool = False
    """Whether its NCCL had not formed when it raised its flags, until they are heard."""
    sent: tuple[tuple[str, Any], ...] = ()
    """The notes that it has sent to other stages."""
    paused: bool = False
    """It was asked to pause."""


class Waits(BaseException):
    """The history ends: the member waits. No error, which the code under test might handle."""

    def __init__(self, waits: str, what: str = "", way: str = "", given: bytes = b"") -> None:
        super().__init__(waits)
        self.found = {"waits": waits, "what": what, "way": way, "given": given}


class Thread:
    """The thread that forms NCCL: it runs when the history says how that ended, or the world is left."""

    def __init__(self, target: Any, name: str, daemon: bool, args: Any = ()) -> None:
        self._target, self._args = target, args
        self.ran = False

    def start(self) -> None:
        if self._args:
            # It aborts.
            self._target(*self._args)
        else:
            # The member is the library of what forms.
            self._target.__self__._library.thread = self

    def run(self) -> None:
        assert not self.ran
        self.ran = True
        self._target()

    def join(self, within_s: float) -> None:
        """Nobody needs to wait for it."""


class Member:
    """A member while its history is replayed; also its stand-ins for the library of NCCL and its communicator."""

    def __init__(self, seat: Seat, history: tuple[Entry, ...]) -> None:
        self.seat = seat
        self.control = Control()
        self.control.begin(0)
        self.thread: Thread | None = None
        self.outcome = "forming"
        self.closed = self.aborted = False
        self.ways, self.heard, self.applied = "", "", seat.first - 1
        self.unready = False
        self.sent: list[tuple[str, Any]] = []
        self.world: World | None = None
        self._history = list(history)
        self._mark = -1
        self._pending = torch.zeros(0)

    def run(self) -> str:
        """Join, take the state, and train; return why that ended."""
        self.world = SoloWorld() if self.seat.size == 1 else NcclWorld(_Host(self), 1.0, lambda: False).join(self)
        if self.seat.lacks:
            self.take("state")
        return train(
            _Steps(self) if self.seat.stage < 0 else _Stages(self),
            Span(first_step=self.seat.first, end=self.seat.end, hosted=(self.seat.rank,), shards=SHARDS),
            (self.world, None),
            # A copy shares a slot of the header with the flag of those that form.
            Companions(feed=self, saving=_Idle(), copying=_Idle(able=self.seat.rank > 0), tell=lambda record: None),
            evaluation=None,
            evaluations=Evaluations(None, {}),
            timeouts=StepTimeouts(step_s=1.0, first_step_s=1.0, wait_s=1.0),
            control=self.control,
        )

    def take(self, waits: str, *of_sum: Any) -> Entry:
        """Return what came of a wait, after what happened meanwhile."""
        while self._history:
            entry = self._history.pop(0)
            if entry in ("ready", "failed"):
                assert self.thread is not None
                self.outcome = entry
                self.thread.run()
            elif entry == "pause":
                self.control.pause(0)
            else:
                return entry
        raise Waits(waits, *of_sum)

    def summed(self, tensor: torch.Tensor, what: str, way: str) -> bool:
        """Wait for a sum, fill the tensor with it, and return True: it has ended."""
        values = tensor.numpy()
        summed = self.take("sum", what, way, values.tobytes())
        values[:] = np.frombuffer(summed, values.dtype).reshape(values.shape)
        return True

    # As the source of the batches:

    def get(self, step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        self.take("begin")
        return StepBatches({}, 0.0)

    def more(self) -> None:
        """There is nothing to prepare."""

    # As the library, and as a communicator:

    def new_id(self) -> bytes:
        return bytes([7 + self.seat.mark, *range(1, ID_BYTES)])

    def begin(self, shared_id: bytes, rank: int, size: int) -> Any:
        assert shared_id[1:] == bytes(range(1, ID_BYTES)), "the id has come whole"
        assert (rank, size) == (self.seat.rank, self.seat.size)
        self._mark = shared_id[0] - 7
        return self

    def state(self) -> Any:
        return "failed" if self.aborted else "under way" if self.outcome == "forming" else self.outcome

    def why(self) -> str:
        return "unhandled system error"

    def reduce(self, tensor: torch.Tensor, operation: str) -> None:
        self._pending = tensor
        self.ways += "n"

    def mark(self) -> Any:
        # NCCL matches sums by their order alone.
        pending, what, way = self._pending, str(len(self.ways)), f"nccl{self._mark}"
        return SimpleNamespace(query=lambda: self.summed(pending, what, way))

    def use(self, event: Any) -> None:
        """There is no device."""

    def abort(self) -> None:
        self.aborted = True


class _Host(FixedTransport):
    """The host's way to sum."""

    def __init__(self, member: Member) -> None:
        self.rank, self.size = member.seat.rank, member.seat.size
        self._member = member

    def reduce(self, tensor: torch.Tensor, name: str, operation: str = "sum") -> Any:
        if name != LEFT:
            self._member.ways += "h"
        return SimpleNamespace(
            ended=lambda within_s: self._member.summed(tensor, name, "host"),
            finish=lambda: None,
        )

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        raise AssertionError

    exchange = reduce_scatter = gather

    def close(self) -> None:
        self._member.closed = True


class _Idle:
    """Nothing is saved or copied."""

    def __init__(self, able: bool = True) -> None:
        self._able = able

    def busy(self) -> bool:
        return False

    def ready(self) -> bool:
        return self._able

    def check(self) -> None:
        """Every state is finite."""

    def due(self, step: int, evaluated: bool = False) -> bool:
        return False

    def copy(self, *_: Any) -> None:
        raise AssertionError


class _Steps:
    """Steps of the whole model, as `step.SynchronousSteps` makes them: the header's sum, and then the weights'."""

    every, begun = 1, -1
    state: Any = None
    passes: Any = SimpleNamespace(bars=())

    def __init__(self, member: Member) -> None:
        self.member = member

    def make(self, steps: range, batches: Callable[[int], Any], context: StepContext) -> list[Applied]:
        [step] = steps
        batches(step)
        self.member.unready = self.member.outcome != "ready"
        applied = self._summed(self._encoded(context.flags()), step, context)
        self.member.unready = False
        self.member.heard += "f" if applied.flags.forming else "r"
        return [applied]

    def complete(self, context: StepContext) -> None:
        context.reduce(torch.ones(1), "weights", "the weights")

    def _encoded(self, flags: Flags) -> Any:
        return encode({self.member.seat.rank: ShardReport(0, 1, 1, 1.0, 0.5)}, SHARDS, flags)

    def _summed(self, encoded: Any, step: int, context: StepContext) -> Applied:
        tensor = to_digits(torch.from_numpy(encoded), torch.float32)
        context.reduce(tensor, f"header {step}", "the sums")
        self.member.applied = step
        return Applied.of(decode(from_digits(tensor).numpy()), 1.0, 0.0, (), ())


class _Stages(_Steps):
    """Overlapping steps of two stages, in the order of `pipedream.PipeDream` with one microbatch in each step.

    The first stage is past all forward passes, and has said what it flags, while the last stage still sums the step
    before. The last stage sends each step's header; only that of a window's last step has flags.
    """

    every = WINDOW

    def make(self, steps: range, batches: Callable[[int], Any], context: StepContext) -> list[Applied]:
        member, last = self.member, self.member.seat.stage == 1
        applied = []
        if not last:
            member.take("begin")
            member.unready = member.outcome != "ready"
            member.sent.append((f"flags {steps[-1]}", tuple(context.flags())))
        for step in steps:
            flags = Flags()
            if last and step == steps[-1]:
                member.take("begin")
                member.unready = member.outcome != "ready"
                own, other = context.flags(), member.take("note", f"flags {step}")
                flags = either([own, Flags(*other)])
            encoded = self._encoded(flags)
            if last:
                member.sent.append((f"header {step}", encoded.tobytes()))
            else:
                encoded = np.frombuffer(member.take("note", f"header {step}"), np.int64).copy()
            applied.append(self._summed(encoded, step, context))
        member.unready = False
        member.heard += "f" if applied[-1].flags.forming else "r"
        member.sent.append((f"agreed {steps[-1]}", True))
        member.take("note", f"agreed {steps[-1]}")
        return applied

    def complete(self, context: StepContext) -> None:
        """All members of a ring change the same weights."""


_MOMENTS: list[Moment] = []
_HISTORIES: list[tuple[Entry, ...]] = []
"""For each moment, one history that leads there."""
_OTHERS: dict[int, list[tuple[Entry, ...]]] = {}
"""Other histories that lead there, which are not continued."""
_NUMBERS: dict[Moment, int] = {}
_AFTER: dict[tuple[int, Entry], int] = {}
_LEFT: set[int] = set()


def moment(number: int) -> Moment:
    """Return the moment with that number."""
    return _MOMENTS[number]


@functools.cache
def begin(seat: Seat) -> int:
    """Return the number of a member's first moment."""
    return _number(seat, ())


def after(number: int, entry: Entry) -> int:
    """Return the moment that follows once this has happened."""
    found = _AFTER.get((number, entry))
    if found is None:
        found = _AFTER[number, entry] = _number(_MOMENTS[number].seat, (*_HISTORIES[number], entry))
    return found


def leave(number: int) -> None:
    """Leave the world at that moment. Raises `Violation` if a part of NCCL remains, or the host's world."""
    if number in _LEFT:
        return
    _LEFT.add(number)
    member, _ = _replayed(_MOMENTS[number].seat, _HISTORIES[number])
    if isinstance(member.world, NcclWorld):
        member.world.close()
        if member.thread is not None and not member.thread.ran:
            # It is still inside of NCCL, and sees then that the world was left.
            member.thread.run()
        if not (member.aborted and member.closed):
            raise Violation(f"{_MOMENTS[number]} leaves something of its worlds")


def _replayed(seat: Seat, history: tuple[Entry, ...]) -> tuple[Member, dict[str, Any]]:
    member = Member(seat, history)
    try:
        return member, {"waits": "over", "what": member.run()}
    except Waits as waits:
        return member, waits.found
    except Exception as error:
        raise Violation(f"{seat} after {history}: {error!r}") from error


def _number(seat: Seat, history: tuple[Entry, ...]) -> int:
    member, found = _replayed(seat, history)
    here = Moment(
        seat,
        **found,
        nccl="" if member.thread is None else member.outcome,
        ways=member.ways,
        heard=member.heard,
        applied=member.applied,
        unready=member.unready,
        sent=tuple(member.sent),
        paused=member.control.pause_requested(),
    )
    number = _NUMBERS.get(here)
    if number is None:
        _check(here)
        number = _NUMBERS[here] = len(_MOMENTS)
        _MOMENTS.append(here)
        _HISTORIES.append(history)
    else:
        _OTHERS.setdefault(number, []).append(history)
    return number


def check_moments() -> int:
    """Raise `Violation` if what follows a moment depends on how a member came there.

    Return how many histories were compared: those that lead to a moment which another one had led to.
    """
    following: dict[int, list[Entry]] = {}
    for number, entry in _AFTER:
        following.setdefault(number, []).append(entry)
    compared = 0
    merged = list(_OTHERS.items())
    # What is replayed now adds to it.
    _OTHERS.clear()
    for number, histories in merged:
        for history in histories:
            for entry in following.get(number, ()):
                compared += 1
                if _number(_MOMENTS[number].seat, (*history, entry)) != _AFTER[number, entry]:
                    raise Violation(f"{_MOMENTS[number]} does not say what {entry} leads to, after {history}")
    _OTHERS.clear()
    return compared


def _check(here: Moment) -> None:
    """Raise `Violation` unless the member uses NCCL from the boundary on at which all were ready, and only then."""
    if here.seat.size == 1:
        return
    if not re.fullmatch("h*n*", here.ways):
        raise Violation(f"more than one switch: {here}")
    switch = here.heard.find("r")
    # The id's, and two sums a step: the header, and the weights before the switch; or, of a window, its headers.
    each = WINDOW if here.seat.stage >= 0 else 2
    old = len(here.ways) if switch < 0 else 1 + each * (switch + 1)
    if here.ways != ("h" * old + "n" * len(here.ways))[: len(here.ways)]:
        raise Violation(f"a switch at another boundary than the first without any that forms: {here}")
    if "n" in here.ways and here.nccl != "ready":
        raise Violation(f"NCCL is used, and has not formed: {here}")
    if here.way.startswith("nccl") and here.way != f"nccl{here.seat.mark}":
        raise Violation(f"a communicator of another generation: {here}")


_TOTALS: dict[tuple[int, ...], bytes] = {}


def total(numbers: tuple[int, ...]) -> bytes | None:
    """Return the sum that these members wait for; None if they do not all wait for the same one, the same way."""
    found = _TOTALS.get(numbers)
    if found is None:
        here = [_MOMENTS[number] for number in numbers]
        if {one.waits for one in here} != {"sum"} or len({(one.what, one.way) for one in here}) > 1:
            return None
        dtype: Any = np.int64 if here[0].what in (NAME, LEFT) else np.float32
        found = _TOTALS[numbers] = sum(np.frombuffer(one.given, dtype) for one in here).tobytes()  # type: ignore[union-attr]
    return found


def check_alike(changed: int, others: Iterable[int]) -> None:
    """Raise `Violation` if a member and others of its ring, dead ones included, sum in different ways."""
    here = _MOMENTS[changed]
    for number in others:
        other = _MOMENTS[number]
        if not (here.ways.startswith(other.ways) or other.ways.startswith(here.ways)):
            raise Violation(f"one sum goes two ways: {here} and {other}")
        if ("n" in here.ways or "n" in other.ways) and {here.nccl, other.nccl} != {"ready"}:
            raise Violation(f"NCCL is used, and has not formed everywhere: {here} and {other}")
