"""Write TensorBoard scalars.

This module writes the format itself instead of using tensorboardX, which loads torch if it is installed: more than a
second and 200 MB in the controller, where TensorBoard's listener runs if it is the only one. A file is a sequence of
records,

    length (8 bytes) | checksum of the length (4) | payload | checksum of the payload (4)

numbers little-endian, checksums CRC-32C, rotated and shifted; a payload is a protocol buffer `Event` {1: wall time,
2: step, 3: the format's name (first record) or 5: summary {1: value {1: tag, 2: metric}} or 7: session {1: status}}.

On a file system this process appends to one file; elsewhere it writes parts, each of which is such a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

from raytrain_plus.errors import FolderGone
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.trackers.event_metrics import EventMetrics, evaluation_metrics
from raytrain_plus.observe.trackers.listener import StorageAway
from raytrain_plus.storage.interface import Folder

PERIOD_S = 5.0
"""Seconds between two writes."""
REMOTE_S = 30.0
"""Seconds between two writes of a part."""
PART_BYTES = 1 << 20
"""A part ends with the records that bring it to at least this many bytes."""


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(map(_crc_entry, range(256)))


class TensorBoard:
    """A `Listener` that writes TensorBoard's files."""

    most = 1000

    def __init__(self, folder: Folder, evaluated: Mapping[int, Mapping[str, float]]) -> None:
        """Write into this folder; `evaluated`: the metrics of earlier evaluations, by step."""
        self._folder = folder
        self._evaluated = dict(evaluated)
        self._metrics = EventMetrics()
        self.period_s = REMOTE_S if folder.path is None else PERIOD_S
        self._name = ""
        """The name of the file that grows; empty if the next records begin one."""
        self._part = b""
        """What that file holds, if it cannot be appended to."""

    def hear(self, events: Sequence[RunEvent]) -> None:
        """See `Listener`. Raises `StorageAway` if the storage does not take the metrics."""
        if records := b"".join(record(payload) for event in events for payload in self._payloads(event)):
            try:
                self._write(records)
            except (OSError, FolderGone) as error:
                raise StorageAway(str(error)) from error

    def end(self, status: str) -> None:
        """See `Listener`; the files do not record how a run ended."""

    def _payloads(self, event: RunEvent) -> Iterator[bytes]:
        metrics = self._metrics.of(event)
        if event["kind"] == "evaluated":
            self._evaluated[event["step"]] = event["metrics"]
        if event["kind"] == "resumed":
            # An evaluation of the state that the run resumes from has the number of the first void step, and counts.
            step, time_s = event["step"], event["time"]
            yield restart_event(time_s, step + 1)
            metrics = evaluation_metrics(step, self._evaluated.get(step, {}), time_s)
        for one in metrics:
            yield scalar_event(one.time_s, one.step, one.name, one.value)

    def _write(self, records: bytes) -> None:
        """Write whole records, or none."""
        name, path = self._name or self._new_name(), self._folder.path
        before = b"" if self._name else record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        if path is None:
            part = self._part + before + records
            self._folder.write(name, [part])
            full = len(part) >= PART_BYTES
            self._name, self._part = ("", b"") if full else (name, part)
            return
        # Create only this folder: its parent is the run's folder, which may have been removed.
        path.mkdir(exist_ok=True)
        size = (path / name).stat().st_size if self._name else 0
        try:
            with (path / name).open("ab") as file:
                file.write(before + records)
        except OSError:
            with contextlib.suppress(OSError):
                if size:
                    os.truncate(path / name, size)
                else:
                    (path / name).unlink()
            raise
        self._name = name

    def _new_name(self) -> str:
        """Return a file name that TensorBoard recognises; later files of the same folder sort after it."""
        return f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"


def scalar_event(time_s: float, step: int, name: str, value: float) -> bytes:
    """Return one metric as a protocol buffer `Event`; `time_s`: Unix seconds."""
    metric = _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", _single(value))
    return _double(1, time_s) + _key(2, 0) + _varint(step) + _bytes(5, _bytes(1, metric))


def restart_event(time_s: float, step: int) -> bytes:
    """Return the `Event` of a session that starts at `step`, as `SummaryWriter(purge_step=step)` writes it."""
    return _double(1, time_s) + _key(2, 0) + _varint(step) + _bytes(7, _key(1, 0) + _varint(1))


def record(payload: bytes) -> bytes:
    """Return a payload framed with its length and checksums."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", _masked(length)) + payload + struct.pack("<I", _masked(payload))


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _single(value: float) -> float:
    """Return `value`, or infinity if it exceeds the range of 32-bit floats, as a cast would."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")
    return value


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
