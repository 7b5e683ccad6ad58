"""Write TensorBoard scalars.

This module writes the format itself instead of using tensorboardX, which loads torch if it is installed: 0.8 s and
180 MB during a run's setup, in a controller that otherwise does not need it. A file is a sequence of records,

    length (8 bytes) | checksum of the length (4) | payload | checksum of the payload (4)

numbers little-endian, checksums CRC-32C, rotated and shifted; a payload is a protocol buffer `Event` {1: wall time,
2: step, 3: the format's name (first record) or 5: summary {1: value {1: tag, 2: metric}} or 7: session {1: status}}.

On a file system a run's controller appends to one file; elsewhere it writes parts (`storage.folders.growing`), each of
which is such a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from raytrain_plus.observe.trackers.event_metrics import MetricValue
from raytrain_plus.storage.folders.appended import Appended
from raytrain_plus.storage.folders.growing import Growing
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages

WRITER = "TensorBoard"
FLUSH_S = 5.0
"""Maximum seconds for which metrics are buffered before they are written to a file."""
PERIOD_S = 30.0
"""Seconds between two writes of a part."""


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(map(_crc_entry, range(256)))


class Scalars:
    """A `Tracker` that writes TensorBoard's files."""

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.time, outages: Outages | None = None) -> None:
        """Write into this folder; `outages` records whether it accepts the metrics, which are kept until it does."""
        self._folder = folder
        self._clock = clock
        self._outages = outages or Outages()
        self._flushed = 0.0
        self._file: Appended | Growing | None = None

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """See `Tracker`."""
        self._write(b"".join(record(scalar_event(one.time_s, one.step, one.name, one.value)) for one in metrics))

    def restart(self, time_s: float, step: int) -> None:
        """Make void what the run's files have from this step on: TensorBoard then shows the later values alone."""
        self._write(record(restart_event(time_s, step)))

    def _write(self, records: bytes) -> None:
        if not records:
            return
        if self._file is None:
            self._file = self._open()
        if isinstance(self._file, Growing):
            self._file.append(records)
            return
        self._file.keep(records)
        if self._clock() - self._flushed >= FLUSH_S:
            self._flushed = self._clock()
            with contextlib.suppress(OSError):
                self._file.flush()

    def end(self, status: str) -> None:
        """See `Tracker`; the files do not record how a run ended."""
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Discard the metrics that are not written yet."""
        if self._file is not None:
            self._file.abandon()

    def _open(self) -> Appended | Growing:
        head = record(_double(1, self._clock()) + _bytes(3, b"brain.Event:2"))
        path = self._folder.path
        if path is None:
            return Growing(self._folder, self._name, PERIOD_S, head, writer=WRITER, outages=self._outages)
        # Create only this folder: its parent is the run's folder, which may have been removed.
        file = Appended(
            self._folder, path / self._name(), WRITER, self._outages, before=lambda: path.mkdir(exist_ok=True)
        )
        file.keep(head)
        self._flushed = self._clock()
        return file

    def _name(self) -> str:
        """Return a file name that TensorBoard recognises; later files of the same folder sort after it."""
        return f"events.out.tfevents.{self._clock():017.6f}.{socket.gethostname()}.{os.getpid()}"


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
