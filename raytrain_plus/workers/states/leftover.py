"""Keep in the run's folder what a worker leaves that ends because no controller comes back; the next one reads it.

    left/worker-0.json    its last generation, the records that no controller has confirmed, its share of a checkpoint

All members stop at one step boundary and write their shares of that state. The next controller of the run completes
events and ledger, and makes the shares a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_plus.membership.mesh import Shape
from raytrain_plus.runs.folder import LEFT
from raytrain_plus.state.stored.manifest import File, Share, Stored, StoredTensor
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import Evaluated, Record, Remark, StepRecord
from raytrain_plus.workers.messages import Charter, WorkerLocation, Written

FORMAT = 1

log = logging.getLogger(__name__)

Kept = tuple[int, Record]
"""A record, with its generation's number in events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastGeneration:
    """The generation that a worker was in last: what the record of a run needs to know of it."""

    number: int
    """Its number in events, ledger and checkpoints."""
    generation: int
    first_step: int
    again: int
    """See `Group.again`."""
    seats: tuple[str, ...]
    shape: Shape

    @classmethod
    def of(cls, charter: Charter) -> LastGeneration:
        """Return the generation of this charter."""
        group = charter.group
        return cls(
            number=charter.number,
            generation=group.generation,
            first_step=charter.first_step,
            again=group.again,
            seats=group.seats,
            shape=group.shape,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """What one worker leaves."""

    location: WorkerLocation
    last: LastGeneration
    records: Sequence[Kept]
    """What no controller has confirmed: steps, evaluations and remarks."""
    written: Written | None
    """Its share of the state that it had; None if it had no whole state, or could not write it."""


def leave(run: Folder, left: Leftover) -> None:
    """Write what a worker leaves. Raises `OSError` if the storage does not take it."""
    document = {
        "format": FORMAT,
        "location": asdict(left.location),
        "last": {**asdict(left.last), "shape": left.last.shape.sizes},
        "records": [[number, *_encoded(record)] for number, record in left.records if _matters(record)],
        "written": None if left.written is None else _encoded_share(left.written),
    }
    run.write(f"{LEFT}/{left.location.worker}.json", [json.dumps(document).encode()])


def leftovers(run: Folder) -> dict[str, Leftover]:
    """Return what workers have left, by their names; logs what cannot be read.

    Raises `OSError` if the storage fails.
    """
    found = {}
    for file in run.files(LEFT):
        try:
            left = _decoded(json.loads(run.read(file)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s/%s cannot be read, so it is not used: %s: %s", run.where, file, type(error).__name__, error)
            continue
        found[left.location.worker] = left
    return found


def _matters(record: Record) -> bool:
    """Return whether the run's record lacks something without it. Profiles and readings of GPUs are of their moment."""
    return isinstance(record, (StepRecord, Evaluated, Remark))


def _encoded(record: Record) -> tuple[str, Any]:
    if isinstance(record, Remark):
        return "remark", list(record)
    fields = asdict(record)
    if isinstance(record, Evaluated):
        return "evaluated", fields
    # The picture of a step is drawn from all of its workers.
    del fields["bars"]
    return "step", {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def _decoded(document: Mapping[str, Any]) -> Leftover:
    if document["format"] != FORMAT:
        raise ValueError(f"it has format {document['format']}, and this version reads format {FORMAT}")
    last, written = document["last"], document["written"]
    return Leftover(
        location=WorkerLocation(**document["location"]),
        last=LastGeneration(**{**last, "seats": tuple(last["seats"]), "shape": Shape(*last["shape"])}),
        records=[(number, _record(kind, value)) for number, kind, value in document["records"]],
        written=None if written is None else _share(written),
    )


def _record(kind: str, value: Any) -> Record:
    if kind == "remark":
        return Remark(*value)
    if kind == "evaluated":
        return Evaluated(**value)
    return StepRecord(
        **{
            **value,
            "lr": tuple(value["lr"]),
            "remarks": tuple(Remark(*one) for one in value["remarks"]),
            "notes": bytes.fromhex(value["notes"]),
            "skipped_rows": bytes.fromhex(value["skipped_rows"]),
            "passes": None if value["passes"] is None else tuple(value["passes"]),
        }
    )


def _encoded_share(written: Written) -> dict[str, Any]:
    assert written.share is not None
    fields = ("step", "generation", "writer", "writers", "tree", "weights", "metrics", "time", "stall_s")
    return {"share": asdict(written.share), **{name: getattr(written, name) for name in fields}}


def _share(fields: Mapping[str, Any]) -> Written:
    share = fields["share"]
    tensors = {
        name: StoredTensor(what["dtype"], tuple(what["shape"]), tuple(Stored(**piece) for piece in what["pieces"]))
        for name, what in share["tensors"].items()
    }
    return Written(**{**fields, "share": Share(File(**share["file"]), tensors), "error": ""})
