"""Define a complete checkpoint: a JSON manifest of every file, every piece, and all values besides tensors. Pure.

    checkpoints/<step>-<generation>/00000-of-00004.safetensors ...     written first and made durable
    checkpoints/<step>-<generation>.json                               creating it commits the checkpoint

A checkpoint of step s holds the state after s. The document begins with the hash of the rest of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.state.dtypes import DTYPES
from raytrain_plus.state.entry import OF_LAYERS, REBUILT
from raytrain_plus.storage import json_shape as has

FORMAT = 1
FOLDER = "checkpoints"
_NAME = re.compile(r"([0-9]{12})-([0-9]{8})")
_FILE = re.compile(r"[0-9]{5}-of-[0-9]{5}\.safetensors")
_SHAPE = has.object_of(
    run=has.text,
    step=has.whole(0),
    generation=has.whole(0),
    time=has.number(0, 1e12),
    job=has.table_of(has.anything),
    task_sha256=has.maybe(has.text),
    versions=has.table_of(has.text),
    data=has.object_of(fingerprint=has.text),
    layout=has.list_of(has.anything),
    random=has.table_of(has.anything),
    metrics=has.table_of(has.number()),
    stall_s=has.number(0, 1e12),
    files=has.list_of(
        has.object_of(name=has.text, bytes=has.whole(0), xxh3_128=has.text, head=has.whole(0), head_xxh3_128=has.text)
    ),
    tensors=has.table_of(
        has.object_of(
            dtype=has.text,
            shape=has.list_of(has.whole(0)),
            pieces=has.list_of(
                has.object_of(
                    file=has.whole(0),
                    start=has.whole(0),
                    bytes=has.whole(0),
                    first=has.whole(0),
                    last=has.whole(0),
                    xxh3_128=has.text,
                )
            ),
        )
    ),
)
_HEAD = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})", ')


@dataclass(frozen=True, slots=True)
class Stored:
    """The location of rows [first, last) of a tensor: `bytes` bytes from byte `start` of a file."""

    file: int
    """The file's index in the manifest's list."""
    start: int
    bytes: int
    first: int
    last: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its pieces, in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Stored, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].bytes


@dataclass(frozen=True, slots=True)
class File:
    """A safetensors file. `head`: the bytes of its header, which this package does not need."""

    name: str
    bytes: int
    xxh3_128: str
    head: int
    head_xxh3_128: str


@dataclass(frozen=True, slots=True)
class Share:
    """The share that one writer has written: a file, and the pieces of tensors in it."""

    file: File
    tensors: Mapping[str, StoredTensor]
    """The tensors' pieces; their `file` is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The manifest of a complete checkpoint."""

    run: str
    step: int
    generation: int
    time: float
    """When the state was copied, in Unix seconds."""
    job: Mapping[str, Any]
    """Every setting of the job."""
    task_sha256: str | None
    """SHA-256 of the task's source (see `job.task_source`); in older versions of the source file of its class."""
    versions: Mapping[str, str]
    data: Mapping[str, Any]
    """Fingerprints, and the position: the number of rows that the run has used."""
    layout: Sequence[Mapping[str, Any]]
    """The members of the view: `worker`, `replica` (the index of the model replica; `cell` in older versions), `stage`,
    `shards`."""
    random: Mapping[str, Any]
    """How random numbers are keyed; they have no other state."""
    metrics: Mapping[str, float]
    """Held-out metrics of this state, if it was evaluated."""
    stall_s: float
    """Seconds for which the copy delayed the training."""
    tree: Any
    """The values that are not tensors: see `state.holding`. `weights` has the name of each parameter, and whether the
    optimizer has a state of it; missing in older versions."""
    files: tuple[File, ...]
    tensors: Mapping[str, StoredTensor]

    @property
    def name(self) -> str:
        """Its name in `checkpoints/`."""
        return name_of(self.step, self.generation)

    @property
    def bytes(self) -> int:
        """The total size of its files in bytes."""
        return sum(file.bytes for file in self.files)


def name_of(step: int, generation: int) -> str:
    """Return a checkpoint's name.

    >>> name_of(199, 3)
    '000000000199-00000003'
    """
    return f"{step:012d}-{generation:08d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return (step, generation) of a checkpoint's name; None if it is not one."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def join_shares(shares: Sequence[Share]) -> tuple[tuple[File, ...], dict[str, StoredTensor]]:
    """Merge shares: return all files, and all tensors with their pieces in order."""
    tensors: dict[str, StoredTensor] = {}
    for number, share in enumerate(shares):
        for name, part in share.tensors.items():
            pieces = [
                Stored(number, piece.start, piece.bytes, piece.first, piece.last, piece.xxh3_128)
                for piece in part.pieces
            ]
            before = tensors[name].pieces if name in tensors else ()
            in_order = sorted((*before, *pieces), key=lambda piece: piece.first)
            tensors[name] = StoredTensor(part.dtype, part.shape, tuple(in_order))
    return tuple(share.file for share in shares), tensors


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the manifest's document. Raises `ValueError` or `CheckpointError` if it could not be read back."""
    rest = json.dumps({"format": FORMAT, **asdict(manifest)}, allow_nan=False)[1:].encode()
    document = f'{{"xxh3_128": "{xxhash.xxh3_128(rest).hexdigest()}", '.encode() + rest
    parse_manifest(document, manifest.name)
    return document


def parse_manifest(document: bytes, name: str) -> Manifest:
    """Parse a manifest's document.

    Raises `DamagedError` if it is damaged or invalid, `CheckpointError` if another version wrote it.
    """
    where = f"{FOLDER}/{name}.json"
    head = _HEAD.match(document)
    rest = document[head.end() :] if head else b""
    if head is None or xxhash.xxh3_128(rest).hexdigest() != head[1].decode():
        raise DamagedError("the manifest is damaged: its content does not match its hash", where=where)
    try:
        values = json.loads(b"{" + rest)
        written = values.pop("format")
    except (ValueError, KeyError, RecursionError) as error:
        raise DamagedError(f"the manifest is not JSON: {type(error).__name__}: {error}", where=where) from None
    if written != FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {written}, but this version reads format {FORMAT}",
            where=where,
            remedy=f"use the version that wrote it (raytrain-plus {_version(values)}) or a newer one",
        )
    if wrong := _SHAPE(values):
        raise DamagedError(f"the manifest is invalid: {wrong}", where=where)
    try:
        manifest = Manifest(
            **{
                **values,
                "files": tuple(File(**file) for file in values["files"]),
                "tensors": {
                    tensor: StoredTensor(
                        what["dtype"], tuple(what["shape"]), tuple(Stored(**at) for at in what["pieces"])
                    )
                    for tensor, what in values["tensors"].items()
                },
            }
        )
        fault = _fault(manifest, name)
    except (KeyError, TypeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise DamagedError(f"the manifest is invalid: {fault}", where=where)
    return manifest


def _version(values: Mapping[str, Any]) -> str:
    versions = values.get("versions")
    return str(versions.get("raytrain-plus", "unknown")) if isinstance(versions, Mapping) else "unknown"


def _fault(manifest: Manifest, name: str) -> str:
    """Return the first inconsistency of a manifest, if any: its content is not trusted."""
    if manifest.name != name:
        return f"it belongs to checkpoint {manifest.name}"
    for file in manifest.files:
        if not _FILE.fullmatch(file.name):
            return f"{file.name!r} is not a valid name of a checkpoint's file"
        if not 0 <= file.head <= file.bytes:
            return f"the header of {file.name} has {file.head} bytes, the file {file.bytes}"
    for tensor_name, tensor in manifest.tensors.items():
        if wrong := has.name(tensor_name):
            return wrong
        if tensor.dtype not in DTYPES:
            return f"{tensor_name} has the unknown dtype {tensor.dtype}"
        rows = tensor.shape[0] if tensor.shape else 1
        at = 0
        for piece in tensor.pieces:
            inside = 0 <= piece.file < len(manifest.files)
            if not inside or piece.start < 0 or piece.start + piece.bytes > manifest.files[piece.file].bytes:
                return f"a piece of {tensor_name} is outside its file"
            if piece.first != at or piece.last < at or piece.bytes * max(rows, 1) != tensor.bytes * (piece.last - at):
                return f"the pieces of {tensor_name} do not cover its rows in order"
            at = piece.last
        if at != rows:
            return f"the pieces of {tensor_name} end at row {at} of {rows}"
    return _lacking(manifest)


def _lacking(manifest: Manifest) -> str:
    """Name a parameter that the checkpoint lacks, or whose optimizer state it lacks; empty if there is none."""
    tree = manifest.tree if isinstance(manifest.tree, Mapping) else {}
    weights, values = tree.get("weights", {}), tree.get("optimizer", {})
    if not isinstance(weights, Mapping) or not isinstance(values, Mapping):
        return "its parameters are not listed by name"
    optimized = {name.split("/", 2)[1] for name in manifest.tensors if name.startswith("optim/")}
    for name, has_state in weights.items():
        if f"param/{name}" not in manifest.tensors:
            return f"it lacks {name}"
        if has_state and name not in optimized and not values.get(name):
            return f"it lacks the optimizer's state of {name}"
    return ""


def kept(found: Iterable[Manifest], keep: int, best: tuple[str, str] | None) -> tuple[list[Manifest], list[Manifest]]:
    """Divide complete checkpoints into those to keep and those to remove, each newest first.

    Keeps the `keep` newest and the best one. `best` is (metric, `min` or `max`).
    """
    ordered = sorted(found, key=newness, reverse=True)
    stay = ordered[: max(1, keep)]
    if best is not None:
        found_best = _best(ordered, *best)
        stay += [] if found_best is None else [found_best]
    names = {manifest.name for manifest in stay}
    return (
        [manifest for manifest in ordered if manifest.name in names],
        [manifest for manifest in ordered if manifest.name not in names],
    )


def _best(found: Iterable[Manifest], metric: str, mode: str) -> Manifest | None:
    """Return the best checkpoint; one without a finite value of `metric` never is, and of equal ones the older is."""
    ordered = sorted(found, key=newness)
    judged = [manifest for manifest in ordered if math.isfinite(manifest.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(judged, key=lambda manifest: sign * manifest.metrics[metric], default=None)


def best_of(found: Iterable[Manifest]) -> Manifest | None:
    """Return the best of a run's complete checkpoints, by the metric of `checkpoint.keep_best` or `early_stop`.

    None if the job of the newest one does not set it, or no checkpoint has the metric.
    """
    ordered = sorted(found, key=newness)
    job = ordered[-1].job if ordered else {}
    checkpoint = job.get("checkpoint")
    wanted = job.get("early_stop") or (checkpoint.get("keep_best") if isinstance(checkpoint, Mapping) else None)
    if not isinstance(wanted, Mapping) or "metric" not in wanted:
        return None
    return _best(ordered, str(wanted["metric"]), str(wanted.get("mode", "min")))


def newness(manifest: Manifest) -> tuple[int, int]:
    """Return the sort key of a checkpoint that is not void: all those belong to one history, whoever wrote them.

    One of a later generation may be of an earlier step: steps that are made again from copies make nothing void.
    """
    return manifest.step, manifest.generation


def void(name: str, resumptions: Iterable[tuple[int, int]]) -> bool:
    """Return whether a later generation resumed from an earlier step; `resumptions` are (generation, step)."""
    at = parse_name(name)
    assert at is not None, name
    return any(at[1] < generation and at[0] > step for generation, step in resumptions)


def lacks(found: Sequence[Manifest]) -> dict[str, str]:
    """Describe which checkpoints of a run lack parameters that others have: name -> what each lacks.

    An older version could call a checkpoint complete although a stage of the model was missing.
    """
    models = {one.name: {tensor for tensor in one.tensors if tensor.startswith("param/")} for one in found}
    whole = set[str]().union(*models.values())
    said = {}
    for name, model in models.items():
        if missing := sorted(map(_short, whole - model)):
            others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            said[name] = f"it lacks {len(missing)} of {len(whole)} parameters: {', '.join(missing[:3])}{others}"
    return said


def mismatch(stored: Mapping[str, StoredTensor], built: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Describe how a model's parameters and buffers (name -> dtype, shape) differ from a checkpoint's."""
    theirs = {name: tensor for name, tensor in stored.items() if name.startswith(OF_LAYERS)}
    if elsewhere := list(_rebuilt_elsewhere(theirs, built)):
        return elsewhere
    said = [f"{_short(name)} is in the checkpoint, not in the task's model" for name in sorted(theirs.keys() - built)]
    said += [f"{_short(name)} is in the task's model, not in the checkpoint" for name in sorted(built.keys() - theirs)]
    for name in sorted(theirs.keys() & built.keys()):
        tensor, (dtype, shape) = theirs[name], built[name]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            said.append(
                f"{_short(name)} is {tensor.dtype} {list(tensor.shape)} in the checkpoint, "
                f"{dtype} {list(shape)} in the task's model"
            )
    return said


def _rebuilt_elsewhere(stored: Collection[str], built: Collection[str]) -> Iterator[str]:
    """Describe the weights that are in a checkpoint as values and are rebuilt by the task, or the other way round."""
    for name in sorted(stored):
        kind, _, weight = name.partition("/")
        if name.startswith(REBUILT) and f"param/{weight}" in built:
            yield f"{weight} is not saved in the checkpoint, and Task.rebuilt does not name it"
        elif kind == "param" and f"{REBUILT}{weight}" in built:
            yield f"{weight} is saved in the checkpoint, and Task.rebuilt names it"


def _short(name: str) -> str:
    return name.partition("/")[2]
