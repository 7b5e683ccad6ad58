"""Freed memory goes back to the system where memory is short, and only there."""

from __future__ import annotations

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from raytrain_plus.trial import memory_limits
from raytrain_plus.trial.memory_limits import is_memory_short
from raytrain_plus.workers.machine.freed_memory import WORTH, return_freed

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.free.argtypes = [ctypes.c_void_p]
COUNT, EACH = 4000, 100_000


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="this C library returns nothing on request")
def test_memory_between_blocks_in_use_is_returned() -> None:
    """The C library by itself returns only what is free at the end of its memory."""
    # In a process of its own: what other tests have freed would take some of the blocks.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        before, freed, refused, after, now = processes.submit(_free_between_blocks_in_use).result(timeout=60)
    assert freed > before + COUNT * EACH * 0.9
    assert refused == 0
    assert now < before + COUNT * EACH * 0.1
    assert abs(after - now) < WORTH


def _free_between_blocks_in_use() -> tuple[int, int, int, int, int]:
    """Return what is used before and after, what `return_freed` answers without and with need, and what is used now."""

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
    freed = used()
    refused = return_freed(LIBC.malloc_trim, used, lambda: False, 0)
    after = return_freed(LIBC.malloc_trim, used, lambda: True, 0)
    now = used()
    for block in (last, *between):
        LIBC.free(block)
    return before, freed, refused, after, now


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
