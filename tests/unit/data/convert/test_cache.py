"""Converted data is kept where this process can write, and where the user says."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.data.convert import cache
from raytrain_plus.data.convert.cache import default_cache, made_once
from raytrain_plus.errors import DataError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_of_these_folders_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "raytrain_plus" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "raytrain_plus" / "data"
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own" / "data"


def test_a_relative_folder_is_refused_and_the_home_folder_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAYTRAIN_CACHE", "~/own")
    assert default_cache() == tmp_path / "own" / "data"
    monkeypatch.setenv("RAYTRAIN_CACHE", "own")
    with pytest.raises(DataError, match="RAYTRAIN_CACHE=own: is a relative path"):
        default_cache()


def test_the_temporary_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache, "_writable", lambda folder: False)
    assert (default_cache().parent.stat().st_mode & 0o777) == 0o700
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    (tmp_path / f"raytrain_plus-{mine + 1}").mkdir()
    with pytest.raises(DataError, match="belongs to another user"):
        default_cache()


@pytest.mark.parametrize("home", ["none", "a file", "read-only"])
def test_without_a_home_that_can_be_written_to_it_is_below_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folder = tmp_path / "home"
    if home == "none":

        def unknown() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(cache.Path, "home", unknown)
    elif home == "a file":
        folder.touch()
    else:
        folder.mkdir()
        writes = os.access

        def access(path: Any, mode: int) -> bool:
            return not Path(path).is_relative_to(folder) and writes(path, mode)

        monkeypatch.setattr(os, "access", access)
    monkeypatch.setenv("HOME", str(folder))
    assert default_cache() == tmp_path / "tmp" / f"raytrain_plus-{os.getuid()}" / "data"


def test_a_full_cache_is_one_sentence_with_the_way_out(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "part"))

    with pytest.raises(DataError, match="cannot be converted: No space left on device") as caught:
        made_once(tmp_path / "target", "rows.csv", full)
    assert "set RAYTRAIN_CACHE on this machine to another folder" in str(caught.value)
