"""Data at an address is the same data as on a disk: the rows, their ids, patterns, changes and errors."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.audit.audit_files import compare
from raytrain_plus.checks.data_report import data_report
from raytrain_plus.data.dataset import dataset
from raytrain_plus.data.paths.page_checksum import without_checksums
from raytrain_plus.data.prepare import check_preparable
from raytrain_plus.data.sources.converted_source import ConvertedSource
from raytrain_plus.data.sources.parquet_source import check_restored, check_unchanged, parquet_source
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import DataChanged, DataError, InputError, JobError
from raytrain_plus.launch.machine_check import Needs, check_machine
from raytrain_plus.storage import retry
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.place import RemotePath, place_of, spelled
from raytrain_plus.storage.probe import Probe
from tests.support.conversions import ROWS, SOURCES
from tests.support.datasets import seen_again
from tests.unit.storage.store import Proxy, at, relaying, serving

TREE = (
    "b.parquet",
    "a.parquet",
    "_hidden.parquet",
    ".part.parquet",
    "2024-01/part-0.parquet",
    "2024-01/part-1.parquet",
    "2024-02/deep/part 0.parquet",
    "2024-02/50%.parquet",
    "data[1]/a.parquet",
    "_temporary/part-0.parquet",
)
PATTERNS = (
    "",
    "a.parquet",
    "*.parquet",
    "?.parquet",
    "[ac].parquet",
    "2024-*/part-*.parquet",
    "**/*.parquet",
    "2024-*/**",
    "2024-0?/deep/part 0.parquet",
    "_*.parquet",
    "data[1]/*.parquet",
)


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, int]]:
    with serving("data") as where:
        yield where


@pytest.fixture(scope="module")
def relay(store: tuple[str, int]) -> Iterator[Proxy]:
    with relaying(store) as server:
        yield server


@pytest.fixture
def proxy(relay: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The proxy without any failures."""
    relay.well()
    monkeypatch.setattr(retry, "PAUSES_S", (0.01,))
    return relay


@pytest.fixture
def away(store: tuple[str, int], tmp_path: Path) -> Folder:
    """An empty folder on S3."""
    host, port = store
    return open_folder(at(f"s3://data/{tmp_path.name}", f"http://{host}:{port}"))


def inside(folder: Folder, name: str) -> str:
    """Return the address of what a path or pattern names inside a folder."""
    where, mark, settings = folder.address.partition("?")
    return f"{where}/{name.replace('%', '%25')}{mark}{settings}"


def through(proxy: Proxy, folder: Folder, name: str) -> str:
    """Return the same address, reached through the proxy."""
    return at(inside(folder, name).partition("?")[0], proxy.address)


def upload(folder: Path, to: Folder) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            to.write(file.relative_to(folder).as_posix(), [file.read_bytes()])


def write(file: Path, begin: int = 0, rows: int = 60) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": range(begin, begin + rows), "t": [f"text {n}" for n in range(begin, begin + rows)]})
    pq.write_table(table, file, row_group_size=25, write_page_checksum=True)


def local_and_remote(tmp_path: Path, away: Folder) -> Path:
    for number, name in enumerate(TREE):
        write(tmp_path / "data" / name, 100 * number)
    upload(tmp_path / "data", away)
    return tmp_path / "data"


def all_rows(data: Source) -> pa.Table:
    return pa.concat_tables([data.read_unit(unit) for unit in range(len(data.unit_rows))])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_ids_and_fingerprint_are_those_of_local_files(tmp_path: Path, away: Folder, pattern: str) -> None:
    folder = local_and_remote(tmp_path, away)
    here, there = parquet_source(folder / pattern), parquet_source(inside(away, pattern) if pattern else away.address)
    assert there.files == here.files
    assert there == replace(here, named=there.named, root=there.root)
    assert all_rows(there).equals(all_rows(here))
    assert seen_again(pickle.loads(pickle.dumps(there))) == there
    faults = Faults()
    compare(place_of(there.named), there.describe()["files"], faults)
    assert not faults.count, faults.found
    assert without_checksums(there.places) == ()


def test_only_the_requested_row_group_is_read(tmp_path: Path, away: Folder, proxy: Proxy) -> None:
    write(tmp_path / "data" / "a.parquet", rows=200_000)
    upload(tmp_path / "data", away)
    data = parquet_source(through(proxy, away, "a.parquet"))
    proxy.seen.clear()
    assert data.read_unit(3).num_rows == 25
    assert [method for method, _ in proxy.seen].count("HEAD") == 2
    assert len(proxy.seen) <= 8


def test_a_changed_object_is_noticed_and_a_restored_one_is_not(tmp_path: Path, away: Folder) -> None:
    write(tmp_path / "a.parquet")
    first = (tmp_path / "a.parquet").read_bytes()
    away.write("a.parquet", [first])
    data = parquet_source(inside(away, "a.parquet"))
    away.write("a.parquet", [first])
    check_unchanged(data)
    # Of the same size, and with the same footer.
    away.write("a.parquet", [first[:100], bytes([first[100] ^ 1]), first[101:]])
    with pytest.raises(DataChanged, match="its ETag changed") as caught:
        data.read_unit(0)
    assert caught.value.first is not None
    assert caught.value.first["etag"]
    assert "restore the object's content and resume" in str(caught.value)
    with pytest.raises(DataError, match="has not been restored"):
        check_restored(data, caught.value.first)
    away.write("a.parquet", [first])
    check_restored(data, caught.value.first)
    write(tmp_path / "a.parquet", rows=61)
    away.write("a.parquet", [(tmp_path / "a.parquet").read_bytes()])
    with pytest.raises(DataChanged, match="its size changed"):
        check_unchanged(data)
    faults = Faults()
    compare(place_of(data.named), data.describe()["files"], faults)
    assert "has changed" in faults.found[0]
    away.remove("a.parquet")
    with pytest.raises(DataChanged, match="it was removed"):
        data.read_unit(0)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("none/*.parquet", "there is no folder s3://data/"),
        ("none.parquet", "there is no such file or folder"),
        ("text", "contains no Parquet files; found 1 .rst"),
        ("text/*.rst", "is not a readable Parquet file (8 bytes)"),
        ("text/*.parquet", "no file matches this pattern"),
        ("text/../x", "this is not a valid address of data"),
    ],
)
def test_missing_data_is_one_sentence_with_the_address(away: Folder, name: str, what: str) -> None:
    away.write("text/a.rst", [b"no table"])
    with pytest.raises(InputError) as caught:
        dataset(inside(away, name))
    assert what in caught.value.what
    assert caught.value.where == inside(away, name.replace("*.rst", "a.rst")).partition("?")[0]
    assert "\n" not in caught.value.what


def test_a_missing_bucket_is_named(store: tuple[str, int]) -> None:
    host, port = store
    with pytest.raises(DataError, match="correct the address \\(s3://no-such does not exist\\)"):
        dataset(at("s3://no-such/data", f"http://{host}:{port}"))


@pytest.mark.parametrize("key", ["data.path", "evaluate.path"])
@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("ftp://host/data", "unsupported address 'ftp://...'"),
        ("s3://KEY:hunter2@bucket/data", "the address contains a credential"),
        ("s3://bucket/data?secret_key=hunter2", "the address contains a credential"),
    ],
)
def test_wrong_addresses_are_refused(key: str, address: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        place_of(address)
    assert what in str(caught.value)
    assert "hunter2" not in str(caught.value)
    data = Data(path=address if key == "data.path" else "x", batch_size=8)
    held_out = None if key == "data.path" else Evaluate(path=address, every_steps=1)
    with pytest.raises(JobError) as of_job:
        Job(name="n", task="t:T", steps=1, data=data, evaluate=held_out)
    assert str(of_job.value).startswith(key)
    assert what in str(of_job.value)


def test_data_is_not_prepared_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maker.py").write_text("def make(folder, name): pass\n")
    job = Job(name="n", task="t:T", steps=1, data=Data(path="s3://b/x", batch_size=8, prepare="maker:make"))
    with pytest.raises(DataError, match=r"data\.path: s3://b/x: data\.prepare writes local folders"):
        check_preparable(job, [tmp_path])


@pytest.mark.slow
def test_a_store_that_fails_for_a_moment_is_asked_again(tmp_path: Path, away: Folder, proxy: Proxy) -> None:
    write(tmp_path / "data" / "a.parquet")
    upload(tmp_path / "data", away)
    data = parquet_source(through(proxy, away, "a.parquet"))
    proxy.answers = [(500, "InternalError")] * 4
    assert data.read_unit(0).num_rows == 25
    proxy.down = True
    with pytest.raises(DataError) as caught:
        data.read_unit(0)
    proxy.well()
    assert caught.value.where.startswith(inside(away, "a.parquet").partition("?")[0])
    assert "\n" not in caught.value.what


def test_what_may_not_be_read_is_not_asked_for_again(tmp_path: Path, away: Folder, proxy: Proxy) -> None:
    write(tmp_path / "data" / "a.parquet")
    upload(tmp_path / "data", away)
    data = parquet_source(through(proxy, away, "a.parquet"))
    proxy.refuse = lambda method, path: method == "GET"
    proxy.seen.clear()
    with pytest.raises(DataError, match="cannot be read") as caught:
        data.read_unit(0)
    assert "tried" not in str(caught.value)
    assert caught.value.remedy == "allow this machine to read it"
    with pytest.raises(DataError, match="cannot be read: permission denied: "):
        parquet_source(spelled(data.places[0]))


@pytest.mark.parametrize("name", SOURCES)
def test_other_formats_are_converted_as_local_files_are(tmp_path: Path, away: Folder, name: str) -> None:
    (tmp_path / "data").mkdir()
    SOURCES[name](tmp_path / "data" / name, ROWS)
    upload(tmp_path / "data", away)
    here = dataset(tmp_path / "data" / name, cache=tmp_path / "here")
    there = dataset(inside(away, name), cache=tmp_path / "there")
    assert (there.fingerprint, there.rows) == (here.fingerprint, here.rows)
    assert all_rows(there).equals(all_rows(here))
    assert isinstance(there, ConvertedSource)
    assert there.named == inside(away, name)
    assert all(file.startswith("s3://") for file, _ in there.origin.files)
    left = [one.name for one in (tmp_path / "there").iterdir() if not one.name.endswith(".lock")]
    assert left == [Path(there.source.named).name], "the copy is removed"
    assert seen_again(there).fingerprint == here.fingerprint


def test_images_have_the_same_classes(tmp_path: Path, away: Folder) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        image.new("RGB", (4, 4)).save(tmp_path / "data" / label / "0.png")
    upload(tmp_path / "data", away)
    for pattern in ("", "*/*.png"):
        here = dataset(tmp_path / "data" / pattern, cache=tmp_path / "here")
        there = dataset(inside(away, pattern) if pattern else away.address, cache=tmp_path / "there")
        assert there.fingerprint == here.fingerprint


def test_a_lance_dataset_is_copied_with_the_files_of_its_rows(tmp_path: Path, away: Folder) -> None:
    lance = pytest.importorskip("lance")
    folder = tmp_path / "rows.lance"
    made = lance.write_dataset(pa.Table.from_pylist(ROWS), str(folder), max_rows_per_file=1100)
    made.delete("id < 10")
    upload(folder, away)
    here = dataset(folder, cache=tmp_path / "here")
    there = dataset(away.address, "lance", cache=tmp_path / "there")
    assert (there.fingerprint, there.rows) == (here.fingerprint, len(ROWS) - 10)
    assert isinstance(there, ConvertedSource)
    assert all("_transactions" not in file for file, _ in there.origin.files)
    assert dataset(away.address, cache=tmp_path / "there") == there, "the format is recognised"
    assert not list(tmp_path.glob("there/.*.copy"))
    away.write("data/" + next((folder / "data").iterdir()).name, [b"cut"])
    with pytest.raises(DataError, match="is not a readable Lance dataset") as caught:
        dataset(away.address, "lance", cache=tmp_path / "again")
    assert caught.value.where == away.address.partition("?")[0]


def test_a_changed_source_is_converted_again(tmp_path: Path, away: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    away.write("a.jsonl", [b'{"x": 1}\n'])
    first = dataset(inside(away, "*.jsonl"), cache=tmp_path)
    capsys.readouterr()
    assert dataset(inside(away, "*.jsonl"), cache=tmp_path) == first
    assert capsys.readouterr().err == ""
    away.write("a.jsonl", [b'{"x": 1}\n{"x": 2}\n'])
    assert dataset(inside(away, "*.jsonl"), cache=tmp_path).rows == 2
    assert "has changed since it was converted" in capsys.readouterr().err


def test_an_error_in_a_file_names_its_address(tmp_path: Path, away: Folder) -> None:
    away.write("rows/a.jsonl", [b'{"x": 1}\nno json\n'])
    with pytest.raises(DataError) as caught:
        dataset(inside(away, "rows"), cache=tmp_path)
    assert str(caught.value).startswith(f"{inside(away, 'rows/a.jsonl').partition('?')[0]}, line 2")
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.glob(".*.copy"))


@pytest.mark.slow
def test_a_killed_copy_continues(tmp_path: Path, away: Folder, proxy: Proxy) -> None:
    for number in range(40):
        away.write(f"{number:02}.jsonl", [json.dumps({"x": number}).encode() + b"\n"])
    address = through(proxy, away, "*.jsonl")
    code = (
        "import sys; from pathlib import Path; from raytrain_plus.data.dataset import dataset\n"
        "dataset(sys.argv[1], cache=Path(sys.argv[2]))"
    )
    # Two files are tried again and again: their answers get lost.
    proxy.lose = lambda method, path: method == "GET" and path.endswith(("/38.jsonl", "/39.jsonl"))
    words = [sys.executable, "-c", code, address, str(tmp_path / "cache")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        while len(copies := list(tmp_path.glob("cache/.*.copy/[0-9]*.jsonl"))) < 30:
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    before = {file.name for file in copies}
    proxy.well()
    proxy.seen.clear()
    data = dataset(address, cache=tmp_path / "cache")
    assert all_rows(data).column("x").to_pylist() == list(range(40))
    asked = {path.rpartition("/")[2] for method, path in proxy.seen if method == "GET" and path.endswith(".jsonl")}
    assert {"38.jsonl", "39.jsonl"} <= asked
    assert not asked & before, "these are not copied again"
    assert not list(tmp_path.glob("cache/.*.copy"))


def test_a_report_and_a_machine_look_at_remote_data(tmp_path: Path, away: Folder) -> None:
    write(tmp_path / "data" / "a.parquet")
    upload(tmp_path / "data", away)
    job = Job(name="n", task="t:T", steps=1, data=Data(path=away.address, batch_size=8))
    report = data_report(job, ())
    assert (report.rows, report.files, report.without_checksums) == (60, 1, ())
    place = place_of(inside(away, "a.parquet"))
    assert isinstance(place, RemotePath)
    entry = place.look()
    assert entry is not None

    def seen(size: int) -> str:
        return check_machine(Needs(Probe(str(tmp_path), "none", b""), {spelled(place): size}, horovod=False)).data

    assert seen(entry.size) == ""
    assert "another size" in seen(1)
    away.remove("a.parquet")
    assert "sees no file" in seen(entry.size)


def test_the_settings_of_an_address_are_told_from_wildcards() -> None:
    place = place_of("s3://b/part-?.parquet?region=eu-west-1&scheme=http")
    assert isinstance(place, RemotePath)
    assert (place.parts, place.settings) == (("part-?.parquet",), "?region=eu-west-1&scheme=http")
    odd = RemotePath("s3://b", ("a?b=1", "50%", "ä b"), "?region=x")
    assert place_of(odd.address) == odd
    assert place_of("file:///data/x") == Path("/data/x")
