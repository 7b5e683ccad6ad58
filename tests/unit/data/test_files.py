"""A data path names one file, the Parquet files below a folder, or the matches of a pattern."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.audit.audit_files import compare
from raytrain_plus.data.paths.files import find_files, split_pattern
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import DataError
from tests.support.datasets import write


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


TREE = (
    "b.parquet",
    "a.parquet",
    "notes.txt",
    "_hidden.parquet",
    ".part.parquet",
    "2024-01/part-0.parquet",
    "2024-01/part-1.parquet",
    "2024-02/part-0.parquet",
    "2024-02/deep/part-0.parquet",
    "2023-12/part-0.parquet",
    "_temporary/part-0.parquet",
)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("[ac].parquet", ["a.parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        (
            "2024-*/part-*.parquet",
            ["2024-01/part-0.parquet", "2024-01/part-1.parquet", "2024-02/part-0.parquet"],
        ),
        ("2024-*/part-1.parquet", ["2024-01/part-1.parquet"]),
        (
            "2024-*/**",
            [
                "2024-01/part-0.parquet",
                "2024-01/part-1.parquet",
                "2024-02/deep/part-0.parquet",
                "2024-02/part-0.parquet",
            ],
        ),
        ("**/deep/*", ["2024-02/deep/part-0.parquet"]),
        ("**/**/a.parquet", ["a.parquet"]),
        ("_*.parquet", ["_hidden.parquet"]),
        ("*", ["a.parquet", "b.parquet", "notes.txt"]),
    ],
)
def test_a_pattern_names_the_files_that_match_in_order(tmp_path: Path, pattern: str, names: list[str]) -> None:
    found = find_files(filled(tmp_path / "data", *TREE) / pattern)
    assert found.root == tmp_path / "data"
    assert list(found.names) == names


def test_a_pattern_that_spells_a_folder_starts_there(tmp_path: Path) -> None:
    found = find_files(filled(tmp_path / "data", *TREE) / "2024-02" / "**" / "*.parquet")
    assert found.root == tmp_path / "data" / "2024-02"
    assert found.names == ("deep/part-0.parquet", "part-0.parquet")


def test_the_recursive_pattern_is_the_folder(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/z.parquet", "_x.parquet", ".git/y.parquet"):
        write(tmp_path / "data" / name, 5)
    whole, matched = parquet_source(tmp_path / "data"), parquet_source(tmp_path / "data" / "**" / "*.parquet")
    assert whole.files == matched.files == ("a/z.parquet", "b.parquet")
    assert whole.fingerprint == matched.fingerprint
    assert matched.read_unit(0).equals(whole.read_unit(0))


def test_the_fingerprint_and_order_do_not_know_the_place(tmp_path: Path) -> None:
    for folder in ("one", "[two]"):
        for day in ("2024-02", "2024-01", "2023-01"):
            write(tmp_path / folder / day / "0.parquet", 9, start=int(day[-1]))
    one, two = (parquet_source(tmp_path / folder / "2024-*" / "*.parquet") for folder in ("one", "[two]"))
    assert one.files == two.files == ("2024-01/0.parquet", "2024-02/0.parquet")
    assert one.fingerprint == two.fingerprint
    assert one.named == str(tmp_path / "one/2024-*/*.parquet")


def test_a_relative_pattern_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "a.parquet", 9)
    monkeypatch.chdir(tmp_path)
    seen = parquet_source("data/*.parquet")
    assert seen.file(0) == tmp_path / "data" / "a.parquet"
    assert seen.describe()["path"] == str(tmp_path / "data" / "*.parquet")


def test_a_path_that_exists_is_taken_literally(tmp_path: Path) -> None:
    filled(tmp_path, "data[1]/a.parquet", "data1/b.parquet", "x*.parquet", "xy.parquet")
    assert find_files(tmp_path / "data[1]").names == ("a.parquet",)
    assert find_files(tmp_path / "data[1]" / "*.parquet").root == tmp_path / "data[1]"
    assert find_files(tmp_path / "x*.parquet").names == ("x*.parquet",)
    assert find_files(tmp_path / "data[13]" / "*.parquet").names == ("data1/b.parquet",)
    assert split_pattern(tmp_path / "data[1]") == (tmp_path / "data[1]", ())


def failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        find_files(path)
    return str(caught.value)


def test_a_pattern_without_a_match_says_so_and_what_to_do(tmp_path: Path) -> None:
    filled(tmp_path / "data", *TREE)
    pattern = tmp_path / "data" / "*.csv"
    assert failure(pattern).splitlines() == [
        f"{pattern}: no file matches this pattern",
        f"  fix: correct the pattern ({tmp_path / 'data'} exists; `**` stands for any number of folders)",
    ]
    assert "append /*.parquet: the pattern matches 2 folders" in failure(tmp_path / "data" / "2024-*")
    assert f"there is no folder {tmp_path / 'nowhere'}" in failure(tmp_path / "nowhere" / "*.parquet")
    assert "'..' cannot follow a wildcard" in failure(tmp_path / "*" / ".." / "data" / "a.parquet")


def test_a_folder_below_a_pattern_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in it would otherwise be missing without a word."""
    filled(tmp_path / "data", *TREE)
    listed = os.listdir

    def listdir(path: Path) -> list[str]:
        if path.name == "2024-02":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert failure(tmp_path / "data" / "*" / "*.parquet").endswith("2024-02: cannot be listed: Permission denied")


WAYS = ("", "**", "**/*.parquet", "*/*.parquet")


@pytest.mark.parametrize("way", WAYS)
def test_links_to_folders_and_files_are_followed(tmp_path: Path, way: str) -> None:
    data = tmp_path / "data"
    filled(data, "2024-01/0.parquet")
    filled(tmp_path / "elsewhere", "b/1.parquet", "2.parquet")
    (data / "2024-02").symlink_to(tmp_path / "elsewhere" / "b")
    (data / "2024-01" / "two.parquet").symlink_to(tmp_path / "elsewhere" / "2.parquet")
    # A hidden name may lead anywhere.
    (data / "_old").symlink_to(data)
    (data / ".gone").symlink_to(tmp_path / "nothing")
    found = find_files(data / way if way else data)
    assert found.names == ("2024-01/0.parquet", "2024-01/two.parquet", "2024-02/1.parquet")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", ["folder", "file", "circle", "nothing"])
def test_links_by_which_rows_would_count_twice_or_not_at_all_are_refused(tmp_path: Path, way: str, link: str) -> None:
    data = tmp_path / "data"
    filled(data, "a/0.parquet", "b/1.parquet")
    if link == "folder":
        (data / "c").symlink_to(data / "a")
        what = f"c/0.parquet: is the same file as {data}/a/0.parquet, by a link, so its rows would count twice"
    elif link == "file":
        (data / "b" / "2.parquet").symlink_to(data / "a" / "0.parquet")
        what = f"b/2.parquet: is the same file as {data}/a/0.parquet, by a link"
    elif link == "circle":
        (data / "b" / "up").symlink_to(data)
        what = f"b/up: leads in a circle: it is a link to {data}"
    else:
        (data / "b" / "gone.parquet").symlink_to(tmp_path / "nothing")
        what = f"b/gone.parquet: is a link to nothing: there is no {tmp_path}/nothing"
    if (link, way) == ("circle", "*/*.parquet"):
        # No part of the pattern leads there.
        assert len(find_files(data / way).names) == 2
    else:
        assert what in failure(data / way if way else data)


def test_two_links_to_one_file_of_a_store_are_two_files(tmp_path: Path) -> None:
    filled(tmp_path / "store", "3f2a")
    (tmp_path / "data").mkdir()
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "store" / "3f2a")
    assert find_files(tmp_path / "data").names == ("a.parquet", "b.parquet")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", ["folder", "file"])
def test_a_link_to_a_link_of_the_data_counts_its_rows_twice(tmp_path: Path, way: str, link: str) -> None:
    data = tmp_path / "data"
    filled(tmp_path / "store", "3f2a")
    (data / "2024-06").mkdir(parents=True)
    (data / "2024-06" / "a.parquet").symlink_to(tmp_path / "store" / "3f2a")
    if link == "folder":
        (data / "latest").symlink_to("2024-06")
    else:
        (data / "2024-06" / "b.parquet").symlink_to("a.parquet")
    assert f"is the same file as {data}/2024-06/a.parquet, by a link" in failure(data / way if way else data)


def test_the_same_bytes_under_two_names_are_two_files(tmp_path: Path) -> None:
    filled(tmp_path / "data", "a.parquet")
    (tmp_path / "data" / "b.parquet").hardlink_to(tmp_path / "data" / "a.parquet")
    assert len(find_files(tmp_path / "data").names) == 2


PARTS = ("*", "**", "a", "b*", "[ab]", "?", "_x", "_*", "*.parquet", "2024-*", "**")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4), st.booleans())
def test_the_audit_finds_the_same_files_by_code_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, pattern: Sequence[str], link: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"tree-{link}"
    if not folder.exists():
        names = [
            f"{top}/{name}" for top in ("a", "b1", "_x", "a/b", "a/_x", "2024-01/a") for name in ("a", "c.parquet")
        ]
        filled(folder, "top.parquet", "_.parquet", *names)
        if link:
            (folder / "a" / "up").symlink_to(folder / "2024-01")
            (folder / "b2").symlink_to(folder / "a")
    faults = Faults()
    try:
        found = find_files(folder.joinpath(*pattern))
    except DataError as error:
        if "by a link" in str(error):
            return
        found = None
    files = [] if found is None else [{"path": name} for name in found.names]
    compare(folder.joinpath(*pattern), files, faults)
    assert [told for told in faults.found if "missing" in told or "new" in told] == []
