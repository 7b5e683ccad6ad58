"""Freed memory goes back to the system where memory is short, and only there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import pytest

from raytrain_plus.training import memory_limits
from raytrain_plus.training.memory_limits import is_memory_short
from raytrain_plus.workers.freed_memory import WORTH, return_freed

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.free.argtypes = [ctypes.c_void_p]
COUNT, EACH = 4000, 100_000


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="this C library returns nothing on request")
def test_memory_between_blocks_in_use_is_returned() -> None:
    """The C library by itself returns only what is free at the end of its memory."""

    def used() -> int:
        return int(psutil.Process().memory_info().rss)

    before = used()
    blocks = [LIBC.malloc(EACH) for _ in range(COUNT)]
    between = [LIBC.malloc(64) for _ in range(10)]
    for block in blocks:
        ctypes.memset(block, 1, EACH)
    blocks.append(LIBC.malloc(EACH))
    last = blocks.pop()
    for block in blocks:
        LIBC.free(block)
    assert used() > before + COUNT * EACH * 0.9
    assert return_freed(LIBC.malloc_trim, used, lambda: False, 0) == 0
    after = return_freed(LIBC.malloc_trim, used, lambda: True, 0)
    assert used() < before + COUNT * EACH * 0.1
    assert abs(after - used()) < WORTH
    for block in (last, *between):
        LIBC.free(block)


def test_a_process_that_has_not_grown_is_left_alone() -> None:
    asked = []
    for used in (100, 100 + WORTH - 1, 100 + WORTH):
        return_freed(lambda pad: asked.append(pad) or 1, lambda used=used: used, lambda: True, 100)  # type: ignore[misc]
    assert asked == [0]


@pytest.mark.parametrize(
    ("limit", "statistics"),
    [("memory.max", "anon 81\nfile 500\n"), ("memory.limit_in_bytes", "cache 500\ntotal_rss 81\n")],
)
def test_files_in_memory_do_not_make_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, statistics: str
) -> None:
    monkeypatch.setattr(memory_limits, "_groups", lambda: [(100, tmp_path)])
    (tmp_path / "memory.stat").write_text(statistics)
    assert is_memory_short()
    (tmp_path / "memory.stat").write_text(statistics.replace("81", "79"))
    assert not is_memory_short()
    (tmp_path / "memory.stat").unlink()
    assert not is_memory_short()
