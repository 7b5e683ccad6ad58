"""Transfers between the chunks of a model: activations, their gradients, and the batch for the loss.

All microbatches with the same number of rows have the same form. The first of them is sent with a description; the
receiver then receives the others straight into place.

Between two stages travel, each with its own tag (`_tag`):

    tensors     activations and gradients: raw, part by part; before gradients, their weight (8 bytes), and a byte for
                each: does it exist?
    messages    descriptions, batches, flags, headers, metrics (`message`: msgpack and raw bytes, never a pickle)

A message begins with its length (8 bytes, little-endian), in a first part of `HEAD_BYTES`; the rest follows in a second
part. Descriptions and notes are read without importing or calling anything that they name.

Both ends of every connection have proved to each other that they are members of this generation
(`collective.torch_world`). That keeps out other processes on the members' machines. Single messages carry no proof. So
an attacker who can change packets between machines is not kept out: that network must be private.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from typing_extensions import override

from raytrain_plus.collective.world import Transfer
from raytrain_plus.errors import RunError, TaskError, TrainingError
from raytrain_plus.parallel.pipeline.layout import MICROBATCHES
from raytrain_plus.parallel.pipeline.message import KNOWN, Classes, class_name, dtype_named, from_bytes, to_bytes
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.torch_compat import pytree

TENSORS = 14
"""The most tensors that may pass between two layers."""
_PARTS = TENSORS + 2
_HEAD, _REST = TENSORS, TENSORS + 1
_GIVEN = _HEAD
"""The part of a backward pass with their weight, and which gradients exist; it uses the tag of a message, which no such
pass has."""
_WEIGHT_BYTES = 8
HEAD_BYTES = 4096
"""Length of a message's first part."""
MESSAGE_BYTES = 1 << 40
"""The longest length of a message that is accepted."""

Pass = Literal["forward", "backward"]
Note = Literal["batch", "flags", "header", "tied", "agreed", "metrics"]
MessageKind = Literal[Pass, Note, "slices"]
_KINDS: tuple[MessageKind, ...] = (
    *("forward", "backward", "batch", "flags", "header", "tied", "agreed", "metrics"),
    "slices",
)


class Peers(Protocol):
    """The world of a model replica: its members are its positions, in order."""

    @property
    def rank(self) -> int:
        """The index of this position."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Start to send a tensor, which must not change until it is sent."""

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Start to receive into a tensor."""


@dataclass(frozen=True, slots=True)
class SameRank(Peers):
    """Those members of a replica that have one tensor rank, as `Peers`: one of each stage."""

    world: Peers
    ranks: int

    @property
    def rank(self) -> int:
        """The number of this stage."""
        return self.world.rank // self.ranks

    @override
    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        return self.world.send(tensor, self._member(to), tag)

    @override
    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        return self.world.receive(tensor, self._member(source), tag)

    def _member(self, stage: int) -> int:
        return stage * self.ranks + self.world.rank % self.ranks


def swapped(peers: Peers, own: torch.Tensor, other: int) -> torch.Tensor:
    """Give a contiguous tensor to another member, and return what that one gives: of the same shape."""
    into, tag = torch.empty_like(own), _tag("slices", 0, 0, 0)
    coming, going = peers.receive(into, other, tag), peers.send(own, other, tag)
    coming.finish(f"the slices of member {other}")
    going.finish(f"member {other} to receive slices")
    return into


@dataclass(frozen=True, slots=True)
class Tensors:
    """A tree of tensors, flattened."""

    values: list[torch.Tensor]
    tree: pytree.TreeSpec

    def whole(self) -> Any:
        """Return the tree."""
        return pytree.tree_unflatten(self.values, self.tree)


class Returned(NamedTuple):
    """What the chunk after a boundary returns of a microbatch."""

    gradients: list[torch.Tensor | None]
    """Those of the activations that take part in the backward pass; None for those without effect on the loss."""
    weight: Weight = 1.0
    """By what the gradients of weights are multiplied."""


def flattened(value: Any, what: str) -> Tensors:
    """Flatten a tree of tensors. Raises `TrainingError` if `what`, its producer, returned anything else."""
    values, tree = pytree.tree_flatten(value)
    other = next((type(one).__name__ for one in values if not isinstance(one, torch.Tensor)), None)
    if other is not None or not values:
        raise TrainingError(
            f"{what} returns {other or 'nothing'}; pipeline stages can exchange only tensors, and tuples, lists and "
            "dicts of tensors"
        )
    if len(values) > TENSORS:
        raise TrainingError(f"{what} returns {len(values)} tensors; pipeline stages can exchange at most {TENSORS}")
    return Tensors(values, tree)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a transfer."""

    forms: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]
    """Dtype and shape of each tensor, and whether it takes part in the backward pass."""
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, tensors: Tensors) -> _Form:
        return cls(
            tuple((value.dtype, tuple(value.shape), value.requires_grad) for value in tensors.values), tensors.tree
        )

    def to_bytes(self, giver: str) -> bytearray:
        """Encode as a message. Raises `TrainingError` if the tree, which `giver` returned, cannot be described."""
        forms = [(str(dtype).removeprefix("torch."), shape, grad) for dtype, shape, grad in self.forms]
        try:
            return to_bytes([forms, _described(self.tree)])
        except TaskError as error:
            raise TrainingError(
                f"{giver} returns its tensors in a container that cannot pass between pipeline stages ({error.what}): "
                "use tuples, lists and dicts of tensors"
            ) from None

    @classmethod
    def from_bytes(cls, message: memoryview) -> _Form:
        """Decode from a message. Raises `RunError` if the description is invalid or names unknown types."""
        try:
            forms, tree = from_bytes(message)
            return cls(
                tuple((dtype_named(dtype), tuple(map(int, shape)), bool(grad)) for dtype, shape, grad in forms),
                _tree(tree),
            )
        except (ValueError, TypeError, KeyError, StopIteration) as error:
            raise RunError(f"a description of another stage's tensors cannot be read: {error}") from error

    def __str__(self) -> str:
        return ", ".join(
            f"{str(dtype).removeprefix('torch.')} {list(shape)}{'' if takes_part else ' without a gradient'}"
            for dtype, shape, takes_part in self.forms
        )


def _described(tree: pytree.TreeSpec) -> Any:
    """Return a tree's node types by name, outermost first; None for a leaf."""
    if tree.is_leaf():
        return None
    children = [_described(child) for child in tree.children()]
    if tree.type is namedtuple:
        return "namedtuple", [class_name(tree.context), list(tree.context._fields)], children
    return class_name(tree.type), tree.context, children


def _tree(described: Any) -> pytree.TreeSpec:
    """Return the tree, made of node types that this process knows: torch's, and those of its own task."""
    if described is None:
        return pytree.treespec_leaf()
    kind, context, children = described
    if kind == "namedtuple":
        name, fields = context
        same = (cls for cls in _named_tuples(tuple) if class_name(cls) == name and list(cls._fields) == fields)
        return pytree.TreeSpec(namedtuple, next(same), list(map(_tree, children)))
    known = {class_name(cls): cls for cls in pytree.SUPPORTED_NODES if cls is not namedtuple}
    return pytree.TreeSpec(known[kind], context, list(map(_tree, children)))


def _named_tuples(cls: Any) -> Iterator[Any]:
    """Yield the named tuples among the classes of this process."""
    for one in cls.__subclasses__():
        if isinstance(getattr(one, "_fields", None), tuple):
            yield one
        yield from _named_tuples(one)


class Handovers:
    """The transfers of one stage in one generation."""

    def __init__(self, peers: Peers, device: torch.device, classes: Classes = KNOWN) -> None:
        """Transfer between these peers; `classes`: of the objects that may be in batches, see `message`."""
        self._peers = peers
        self._device = device
        self._classes = classes
        self._forms: dict[tuple[int, int, bool], _Form] = {}
        """(boundary, rows, whether gradients are enabled) -> form of the transfer.

        A boundary has the number of the chunk before it.
        """
        self._coming: dict[tuple[MessageKind, int, int], tuple[list[torch.Tensor], list[Transfer]]] = {}
        self._kept: dict[tuple[MessageKind, int], Any] = {}
        """The notes to itself."""
        self._heads: dict[tuple[MessageKind, int, int], tuple[torch.Tensor, Transfer]] = {}
        self._going: dict[tuple[MessageKind, int, int], list[tuple[torch.Tensor, Transfer, str]]] = {}

    def send(self, boundary: int, microbatch: int, rows: int, tensors: Tensors, to: int, giver: str) -> None:
        """Start to send activations. `giver` names the layer that they come from.

        Raises `TrainingError` if their form differs from that of another microbatch with the same number of rows.
        """
        key = (boundary, rows, torch.is_grad_enabled())
        form, known = _Form.of(tensors), self._forms.get(key)
        if known is None:
            self._forms[key] = form
            self._send_bytes("forward", boundary, microbatch, form.to_bytes(giver), to)
        elif known != form:
            raise TrainingError(
                f"{giver} returns {form} for one microbatch of {rows} rows and {known} for another; "
                "pipeline stages need the same shapes in every step: pad in `collate`"
            )
        for part, value in enumerate(tensors.values):
            # A stage may return tensors of the host, too; they are received on the device.
            self._send("forward", boundary, microbatch, part, value.detach().to(self._device), to)

    def send_gradients(
        self, boundary: int, microbatch: int, inputs: Sequence[torch.Tensor], weight: float, to: int
    ) -> None:
        """Start to return the weight, and the gradients of received activations that take part and have one."""
        given = torch.tensor([value.grad is not None for value in inputs], dtype=torch.uint8)
        head = torch.cat([torch.tensor([weight], dtype=torch.float64).view(torch.uint8), given])
        self._send("backward", boundary, microbatch, _GIVEN, head, to)
        for part, value in enumerate(inputs):
            # The receiver waits for every part, and discards those of missing gradients.
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            self._send("backward", boundary, microbatch, part, gradient, to)

    def send_note(self, kind: Note, number: int, value: Any, to: int) -> None:
        """Start to send a value other than a layer's tensors. `number`: of the microbatch, or of the sending stage.

        Raises `TaskError` if the task's batch contains values that no message can carry.
        """
        if to == self._peers.rank:
            self._kept[kind, number] = value
        else:
            self._send_bytes(kind, 0, number, to_bytes(value, self._classes, kind), to)

    def expect(self, kind: Pass, boundary: int, microbatch: int, rows: int, giver: int) -> None:
        """Start to receive if the form is known."""
        form = self._forms.get((boundary, rows, torch.is_grad_enabled()))
        key = (kind, boundary, microbatch)
        if form is None or key in self._coming:
            return
        into = [
            torch.empty(shape, dtype=dtype, device=self._device)
            for dtype, shape, takes_part in form.forms
            if kind == "forward" or takes_part
        ]
        parts = list(enumerate(into))
        if kind == "backward":
            into.append(torch.empty(_WEIGHT_BYTES + len(into), dtype=torch.uint8))
            parts.insert(0, (_GIVEN, into[-1]))
        transfers = [self._peers.receive(value, giver, _tag(kind, boundary, microbatch, part)) for part, value in parts]
        self._coming[key] = into, transfers

    def take(self, boundary: int, microbatch: int, rows: int, giver: int) -> tuple[Tensors, list[bool]]:
        """Return the activations of a microbatch, and which of them take part in the backward pass."""
        key = (boundary, rows, torch.is_grad_enabled())
        if key not in self._forms:
            self._forms[key] = _Form.from_bytes(self._receive_bytes("forward", boundary, microbatch, giver))
        form = self._forms[key]
        values = self._taken("forward", boundary, microbatch, rows, giver)
        return Tensors(values, form.tree), [takes_part for _, _, takes_part in form.forms]

    def take_gradients(self, boundary: int, microbatch: int, rows: int, giver: int) -> Returned:
        """Return the gradients of the sent activations."""
        *taken, head = self._taken("backward", boundary, microbatch, rows, giver)
        # The activations of these gradients have arrived, so nothing keeps them any more.
        self.finish_one("forward", boundary, microbatch)
        [weight], given = head[:_WEIGHT_BYTES].view(torch.float64).tolist(), head[_WEIGHT_BYTES:].tolist()
        return Returned([value if there else None for value, there in zip(taken, given, strict=True)], weight)

    def expect_note(self, kind: Note, number: int, giver: int) -> None:
        """Start to receive a note."""
        if giver != self._peers.rank:
            self._expect_head(kind, 0, number, giver)

    def take_note(self, kind: Note, number: int, giver: int) -> Any:
        """Return a note from another stage, or from this one."""
        if giver == self._peers.rank:
            return self._kept.pop((kind, number))
        return from_bytes(self._receive_bytes(kind, 0, number, giver), self._classes)

    def finish(self) -> None:
        """Wait until everything sent has arrived. Raises `Interrupted` if the world breaks."""
        for key in list(self._going):
            self.finish_one(*key)

    def finish_one(self, kind: MessageKind, boundary: int, microbatch: int) -> None:
        """Wait until one thing has arrived, if it was sent."""
        for _, transfer, what in self._going.pop((kind, boundary, microbatch), ()):
            transfer.finish(what)

    def _taken(self, kind: Pass, boundary: int, microbatch: int, rows: int, giver: int) -> list[torch.Tensor]:
        self.expect(kind, boundary, microbatch, rows, giver)
        values, transfers = self._coming.pop((kind, boundary, microbatch))
        for transfer in transfers:
            transfer.finish(f"the {kind} pass of microbatch {microbatch} from stage {giver}")
        return values

    def _send(self, kind: MessageKind, boundary: int, microbatch: int, part: int, value: torch.Tensor, to: int) -> None:
        value = value.contiguous()
        transfer = self._peers.send(value, to, _tag(kind, boundary, microbatch, part))
        # The tensor is read until it has arrived.
        what = f"stage {to} to receive the {kind} pass of microbatch {microbatch}"
        self._going.setdefault((kind, boundary, microbatch), []).append((value, transfer, what))

    def _send_bytes(self, kind: MessageKind, boundary: int, microbatch: int, data: bytearray, to: int) -> None:
        head = bytearray(HEAD_BYTES)
        head[:8] = len(data).to_bytes(8, "little")
        first = data[: HEAD_BYTES - 8]
        head[8 : 8 + len(first)] = first
        self._send(kind, boundary, microbatch, _HEAD, torch.frombuffer(head, dtype=torch.uint8), to)
        if len(data) > len(first):
            rest = torch.frombuffer(data, dtype=torch.uint8, offset=len(first))
            self._send(kind, boundary, microbatch, _REST, rest, to)

    def _expect_head(self, kind: MessageKind, boundary: int, microbatch: int, giver: int) -> None:
        key = (kind, boundary, microbatch)
        if key not in self._heads:
            into = torch.empty(HEAD_BYTES, dtype=torch.uint8)
            self._heads[key] = (into, self._peers.receive(into, giver, _tag(kind, boundary, microbatch, _HEAD)))

    def _receive_bytes(self, kind: MessageKind, boundary: int, microbatch: int, giver: int) -> memoryview:
        what = f"the {kind} of microbatch {microbatch} from stage {giver}"
        self._expect_head(kind, boundary, microbatch, giver)
        into, transfer = self._heads.pop((kind, boundary, microbatch))
        transfer.finish(what)
        length = int.from_bytes(into[:8].numpy().tobytes(), "little")
        if length <= HEAD_BYTES - 8:
            return memoryview(into[8 : 8 + length].numpy().data)
        if length > MESSAGE_BYTES:
            raise RunError(f"{what} claims a length of {length} bytes: the message is damaged")
        whole = torch.empty(length, dtype=torch.uint8)
        whole[: HEAD_BYTES - 8] = into[8:]
        self._peers.receive(whole[HEAD_BYTES - 8 :], giver, _tag(kind, boundary, microbatch, _REST)).finish(what)
        return memoryview(whole.numpy().data)


def _tag(kind: MessageKind, boundary: int, microbatch: int, part: int) -> int:
    assert microbatch < MICROBATCHES
    return ((boundary * len(_KINDS) + _KINDS.index(kind)) * MICROBATCHES + microbatch) * _PARTS + part
