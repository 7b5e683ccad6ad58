"""Events of runs, written and shown."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboardX.crc32c import crc32c as their_crc32c
from tensorboardX.proto.event_pb2 import Event as Payload
from tensorboardX.proto.event_pb2 import SessionLog

from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.storage.interface import Folder


def tell(run: Folder, events: Iterable[tuple[int, str, dict[str, Any]]]) -> None:
    if run.path is not None:
        run.path.mkdir(exist_ok=True)
    log = EventLog(run)
    for generation, kind, fields in events:
        log.write(kind, generation=generation, fields=fields)
    log.close()


def committed(generation: int, *steps: int) -> list[tuple[int, str, dict[str, Any]]]:
    fields = {"epoch": 0, "samples": 8, "loss": 1.0, "grad_norm": 0.3, "seconds": 0.1}
    return [(generation, "step_committed", {"step": step, **fields}) for step in steps]


def resumed(generation: int, step: int, made: int) -> tuple[int, str, dict[str, Any]]:
    return generation, "resumed", {"step": step, "checkpoint": None, "voided_to": made}


def payloads(data: bytes) -> list[Any]:
    """Return a file's records; foreign code verifies each checksum."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        checks = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length : 16 + length])
        for part, check in zip((data[:8], data[12 : 12 + length]), checks, strict=True):
            crc = their_crc32c(part)
            assert ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF == check
        found.append(Payload.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard shows: a session that starts voids what has its step or later."""
    values: list[tuple[int, float]] = []
    for file in sorted(folder.iterdir()):
        for one in payloads(file.read_bytes()):
            if one.HasField("session_log") and one.session_log.status == SessionLog.START:
                values = [value for value in values if value[0] < one.step]
            values += [(one.step, value.simple_value) for value in one.summary.value if value.tag == tag]
    return values
