"""A dataset that can only be iterated is read once, in order, and again if it changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import returned_dataset
from raytrain_plus.data.sources.iterated import _folder_name, read_once
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.sources.user_dataset import UserDataset, open_dataset
from raytrain_plus.errors import DataError, TaskError
from tests.support.datasets import seen_again

SOURCE = """
import os
import random
import torch

asked = []

class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, length, shift=0):
        self.length, self.shift = length, shift

    def __iter__(self):
        for number in range(self.length):
            asked.append(number)
            yield {"x": torch.full((2,), number + self.shift), "y": number}

def numbers(): return Numbers(2500)
def changing(): return Numbers(2500, int(os.environ.get("SHIFT", "0")))
def generator(): return iter(Numbers(2500))
def empty(): return Numbers(0)
def odd(): return ({"x": number if number != 1700 else "no number"} for number in range(2500))
def shuffled():
    numbers = list(range(2500))
    random.shuffle(numbers)
    return iter(numbers)
def in_any_order():
    numbers = list(range(2500))
    random.Random().shuffle(numbers)
    return iter(numbers)
started = iter(range(2500))
def started_before(): return started
def at_once(): raise_here = {}; return (raise_here[key] for key in [1])
class Closed:
    def __iter__(self): raise KeyError("closed")
def closed(): return Closed()
def raises():
    for number in range(2500):
        if number == 1200:
            raise OSError("the connection was closed")
        yield number
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "numbers_of.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("numbers_of", None)
    open_dataset.cache_clear()


def read(root: Path, name: str) -> Source:
    return returned_dataset(f"numbers_of:{name}", [root], cache=root / "cache")


def column(seen: Source, name: str = "y") -> list[int]:
    return [value for unit in range(len(seen.unit_rows)) for value in seen.read_unit(unit).column(name).to_pylist()]


@pytest.mark.parametrize("name", ["numbers", "generator"])
def test_all_items_are_read_in_order_and_once(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = read(root, name)
    assert column(seen) == list(range(2500))
    assert column(seen, "x")[7] == [7, 7]
    assert seen.named == f"numbers_of:{name}"
    assert seen.describe()["converted_from"] == seen.named
    said = capsys.readouterr().err
    assert f"reading numbers_of:{name} once, into Parquet" in said
    assert f"read numbers_of:{name}: 2,500 rows in" in said
    asked = sys.modules["numbers_of"].asked
    asked.clear()
    assert read(root, name) == seen
    # Only the first ones, to know whether they are the same.
    assert len(asked) <= 65
    assert re.fullmatch(rf"rows of numbers_of:{name} are those in .*; delete it to .*\n", capsys.readouterr().err)
    assert pq.ParquetFile(seen.places[0]).metadata.row_group(0).num_rows == seen.unit_rows[0]


def test_changed_items_are_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = read(root, "changing")
    monkeypatch.setenv("SHIFT", "5")
    other = read(root, "changing")
    assert other.fingerprint != seen.fingerprint
    assert column(other, "x")[0] == [5, 5]


def test_a_reading_that_was_cut_off_begins_anew(root: Path) -> None:
    with pytest.raises(TaskError, match="item 1200 raised OSError: the connection was closed"):
        read(root, "raises")
    assert not [folder for folder in (root / "cache").iterdir() if not folder.name.startswith(".")]
    source = (root / "numbers_of.py").read_text()
    (partial,) = (folder for folder in (root / "cache").iterdir() if folder.name.endswith(".partial"))
    whole = read(root, "generator")
    (root / "cache" / partial.name / "part-00007.parquet").write_bytes(b"left")
    sys.modules["numbers_of"].raises = lambda: iter(range(2500))
    assert column(read(root, "raises"), "_") == column(whole)
    assert source == (root / "numbers_of.py").read_text()


def test_items_that_do_not_fit_are_named(root: Path) -> None:
    with pytest.raises(DataError, match="item 1700: field 'x' is not int64, as in other items"):
        read(root, "odd")
    with pytest.raises(DataError, match="numbers_of:empty: there are no rows"):
        read(root, "empty")


def test_a_worker_reads_its_own_copy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    seen = returned_dataset("numbers_of:numbers", [root])
    assert seen_again(seen, root) == seen


def test_a_dataset_of_ray_is_read_on_the_drivers_machine_alone(root: Path) -> None:
    class Lazy:
        def __init__(self, *files: Path) -> None:
            self._files = [str(file) for file in files]

        def input_files(self) -> list[str]:
            return self._files

    def refused(*files: Path) -> str:
        found = UserDataset("numbers_of:numbers", (str(root),), Lazy(*files), "ray")
        with pytest.raises(DataError, match=r"(?s)read on the driver's machine alone.*write_parquet") as raised:
            read_once(found, root / "cache", lambda read: None, in_worker=True)
        return str(raised.value)

    assert "numbers_of:numbers on " in refused()
    assert not (root / "cache").exists()
    # What it reads belongs to its name in the cache.
    names = {_folder_name(UserDataset("numbers_of:numbers", (str(root),), Lazy(*files), "ray"), "") for files in (
        (), (root / "numbers_of.py",), (root / "none",),
    )}  # fmt: skip
    assert len(names) == 3


@pytest.mark.parametrize("name", ["in_any_order", "started_before"])
def test_an_order_that_changes_is_refused(root: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"(?s)first items are not the same each time.*from a new iterator"):
        read(root, name)


def test_random_numbers_in_the_function_are_the_same_everywhere(root: Path) -> None:
    assert column(read(root, "shuffled"), "_") == column(read(root, "shuffled"), "_") != list(range(2500))


def test_rows_in_another_order_are_other_data(root: Path) -> None:
    seen = read(root, "shuffled")
    (content,) = (root / "cache").glob("*/_content")
    content.write_text("another")
    assert read(root, "shuffled").fingerprint != seen.fingerprint


def test_an_edited_module_is_read_again(root: Path) -> None:
    read(root, "numbers")
    (root / "numbers_of.py").write_text(SOURCE + "\nmore = 1\n")
    read(root, "numbers")
    assert len([one for one in (root / "cache").iterdir() if not one.name.startswith(".")]) == 2


@pytest.mark.parametrize(
    ("name", "what"), [("closed", "item 0 raised KeyError: 'closed'"), ("at_once", "raised KeyError")]
)
def test_errors_before_the_first_item_are_the_users(root: Path, name: str, what: str) -> None:
    with pytest.raises(TaskError, match=what):
        read(root, name)
