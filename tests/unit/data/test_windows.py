"""The windows of a stream are those of a plain loop over its numbers, each once an epoch, and changes are noticed."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.audit.audit import Epoch, audit
from raytrain_plus.bring.model_task import Model
from raytrain_plus.checks.data_report import data_report
from raytrain_plus.data.dataset import both_data, training_data
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.reading.reader import held_out
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources import windows
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.windows import WindowsSource, windows_of
from raytrain_plus.errors import DataChanged, DataError, JobError
from raytrain_plus.task import Task, column_tensor
from tests.support.datasets import gather, seen_again
from tests.support.ledgers import notes_of, run_of

LENGTH = 8
STREAM = np.random.default_rng(0).integers(0, 60_000, 1_000, dtype=np.uint16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    STREAM.tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def job_of(path: Path, *, epochs: int = 2, evaluate: Evaluate | None = None, **data: Any) -> Job:
    given: dict[str, Any] = {"format": "uint16", "windows": LENGTH, "batch_size": 16, "shards": 4, **data}
    return Job(name="run", task="t:T", data=Data(path=str(path), **given), epochs=epochs, seed=3, evaluate=evaluate)


def pairs_of(table: pa.Table) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the rows as pairs of tokens and targets."""
    return [(tuple(row["input_ids"]), tuple(row["targets"])) for row in table.to_pylist()]


def pairs_at(stream: np.ndarray, begins: range) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what `get_batch` of nanoGPT makes of a stream at these places."""
    return [(tuple(stream[i : i + LENGTH].tolist()), tuple(stream[i + 1 : i + 1 + LENGTH].tolist())) for i in begins]


def used(job: Job, shards: tuple[int, ...] = (0, 1, 2, 3), first: int = 0) -> dict[tuple[int, int], list[Any]]:
    """Return the rows of each step and shard, as tuples."""
    return gather(rows_of(job, training_data(job, []), None), shards=shards, first=first)[0]


@pytest.mark.parametrize(("stride", "windows_in_all"), [(1, 992), (LENGTH, 124), (3, 331)])
def test_each_window_is_used_once_an_epoch(file: Path, stride: int, windows_in_all: int) -> None:
    job = job_of(file, stride=stride, epochs=1)
    seen = training_data(job, [])
    assert seen.rows == windows_in_all
    rows = [(tuple(x), tuple(y)) for batch in used(job).values() for x, y in batch]
    assert len(rows) == windows_in_all
    assert sorted(rows) == sorted(pairs_at(STREAM, range(0, len(STREAM) - LENGTH, stride)))


def test_windows_are_permuted_over_the_whole_file_or_not_at_all(file: Path) -> None:
    plain = windows_of(file, "uint16", LENGTH, 1, scattered=False)
    assert pairs_of(without_ids(plain.read_unit(1))) == pairs_at(STREAM, range(256, 512))
    scattered = windows_of(file, "uint16", LENGTH, 1, scattered=True)
    first = scattered.name_rows(0, range(256))
    begins = [int(word) for word in first.split(" of ")[0].replace(",", "").split() if word.isdecimal()]
    assert [len([b for b in begins if q * 248 <= b < (q + 1) * 248]) > 30 for q in range(4)] == [True] * 4
    assert pairs_of(without_ids(scattered.read_unit(0))) == [pairs_at(STREAM, range(b, b + 1))[0] for b in begins]


def test_two_epochs_and_two_seeds_have_other_orders(file: Path) -> None:
    found = used(job_of(file))
    steps = len(found) // 4
    first = [found[step, 0] for step in range(steps // 2)]
    assert first != [found[step, 0] for step in range(steps // 2, steps)][: len(first)]
    assert found == used(job_of(file))


def test_a_run_that_is_resumed_on_fewer_workers_uses_the_same_rows(file: Path) -> None:
    whole = used(job_of(file))
    for shards in ((0, 2), (1, 3)):
        part = used(job_of(file), shards, first=17)
        assert part == {at: rows for at, rows in whole.items() if at[0] >= 17 and at[1] in shards}


@pytest.mark.parametrize("numbers", ["uint8", "uint16", "uint32", "int16", "int32", "int64"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_every_type_of_numbers_gives_the_same_rows(tmp_path: Path, numbers: Any, suffix: str) -> None:
    stream = (STREAM % 100).astype(numbers)
    file = tmp_path / f"train{suffix}"
    if suffix == ".npy":
        np.save(file, stream)
    else:
        stream.tofile(file)
    seen = windows_of(file, numbers if suffix == ".bin" else None, LENGTH, 1, scattered=False)
    assert pairs_of(without_ids(seen.read_unit(0))) == pairs_at(stream, range(256))


def test_files_of_a_folder_are_streams_of_their_own(tmp_path: Path) -> None:
    STREAM[:300].tofile(tmp_path / "a.bin")
    STREAM[300:].tofile(tmp_path / "b.bin")
    job = job_of(tmp_path, epochs=1)
    rows = [(tuple(x), tuple(y)) for batch in used(job).values() for x, y in batch]
    wanted = pairs_at(STREAM[:300], range(292)) + pairs_at(STREAM[300:], range(692))
    assert sorted(rows) == sorted(wanted)
    source = training_data(job, [])
    assert [source.file_of(unit) for unit in (1, 2)] == [str(tmp_path / "a.bin"), str(tmp_path / "b.bin")]
    assert [file["row_groups"] for file in source.describe()["files"]] == [[256, 36], [256, 256, 180]]


def test_a_mix_of_two_streams(file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "other.npy", STREAM[::-1].astype(np.int32))
    mix = [
        {"path": str(file), "format": "uint16", "weight": 1},
        {"path": str(tmp_path / "other.npy"), "weight": 1},
    ]
    job = Job(name="x", task="t:T", steps=10, data=Data(mix=mix, windows=LENGTH, batch_size=16, shards=4))
    seen = training_data(job, [])
    assert (seen.rows, seen.in_memory) == (2 * 992, True)
    rows, _ = gather(rows_of(job, seen, None))
    known = {*pairs_at(STREAM, range(992))}, {*pairs_at(STREAM[::-1], range(992))}
    for batch in rows.values():
        assert [sum((tuple(x), tuple(y)) in own for x, y in batch) for own in known] == [2, 2]


def test_the_audit_finds_every_window_used_once_and_a_file_that_has_changed(file: Path, tmp_path: Path) -> None:
    job = replace(job_of(file), storage=str(tmp_path))
    folder = run_of(job, notes_of(job))
    assert audit(folder).faults == ()
    assert audit(folder).epochs == (Epoch(0, 992, 0, 992, 0), Epoch(1, 992, 0, 992, 0))
    changed = STREAM.copy()
    changed[500] ^= 1
    changed.tofile(file)
    assert audit(folder).faults == ("train.bin has changed: its content differs",)
    STREAM[:-1].tofile(file)
    assert audit(folder).faults == ("train.bin has changed: 1,998 bytes now, 2,000 when the run began",)
    file.unlink()
    assert audit(folder).faults == ("train.bin is missing; the run began with it",)


def test_workers_see_the_same_rows_and_other_numbers_are_other_data(file: Path, tmp_path: Path) -> None:
    seen = training_data(job_of(file), [])
    again = seen_again(pickle.loads(pickle.dumps(seen)))
    assert again.read_unit(2).equals(seen.read_unit(2))
    for other, said in (
        (training_data(job_of(file, stride=2), []), "it is cut into other windows, or not at all"),
        (training_data(job_of(file, format="int16"), []), "some rows have other values, or another order"),
    ):
        assert differences(other.describe(), seen.describe()) == [said]
    changed = STREAM.copy()
    changed[3] += 1
    changed.tofile(file)
    with pytest.raises(DataError, match=r"train\.bin has a different content"):
        seen_again(seen)


def test_a_file_that_changes_during_the_run_is_noticed(file: Path) -> None:
    seen = training_data(job_of(file), [])
    assert isinstance(seen, WindowsSource)
    seen.read_unit(0)
    os.truncate(file, 0)
    for check in (lambda: seen.read_unit(0), lambda: windows.check_windows(seen)):
        with pytest.raises(DataChanged, match="its size changed: 2,000 -> 0 bytes"):
            check()


def test_nothing_is_kept_or_streamed(file: Path) -> None:
    rows = rows_of(job_of(file), training_data(job_of(file), []), None)
    assert not rows.fit(10_000)
    _, feed = gather(rows, make_stream=lambda *_, **__: pytest.fail("a stream"))
    assert feed.streamed_reads == 0


def test_a_stream_of_a_billion_tokens_needs_no_table(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    with file.open("wb") as opened:
        opened.truncate(2 * 10**9)
    seen = windows_of(file, "uint16", 64, 1, scattered=True)
    assert seen.rows == 10**9 - 64
    assert len(seen.unit_rows) <= windows.BLOCKS
    rows = np.arange(32)
    assert seen.read_rows(len(seen.unit_rows) - 2, rows).num_rows == 32
    assert len(seen.name_rows(17, [0])) < 200


def test_batches_of_a_plain_task_and_of_a_model_that_shifts_its_labels(file: Path) -> None:
    table = without_ids(windows_of(file, "uint16", LENGTH, 1, scattered=False).read_rows(0, np.arange(4)))

    class Plain(Task):
        pass

    batch = Task.collate(Plain.__new__(Plain), table)  # type: ignore[type-abstract]
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "targets"), (4, LENGTH)
    )
    assert batch["input_ids"].tolist() == [list(x) for x, _ in pairs_at(STREAM, range(4))]
    model = Model(build="tests.support.pretrained:gpt2")
    given = model.collate(table)
    assert given["labels"].equal(column_tensor(table, "input_ids"))
    assert "targets" not in given


def test_held_out_windows(file: Path, tmp_path: Path) -> None:
    STREAM[:200].tofile(tmp_path / "val.bin")
    job = job_of(file, evaluate=Evaluate(path=str(tmp_path / "val.bin"), every_steps=5))
    _, tested = both_data(job, [])
    assert tested is not None
    rows = held_out_rows_of(job, tested, None)
    made = [row for shard in range(4) for one in held_out(rows, shard, 4, pairs_of) for row in one.batch]
    assert made == pairs_at(STREAM[:200], range(192))


def test_the_report_of_the_data(file: Path) -> None:
    lines = data_report(job_of(file), []).lines()
    assert lines[0].startswith(f"{file}: 992 rows, ")
    assert lines[1] == "  read by index"
    assert "input_ids  fixed_size_list<item: int64>[8]" in lines[2]


def _write(file: Path, numbers: np.ndarray) -> None:
    np.save(file, numbers) if file.suffix == ".npy" else numbers.tofile(file)


@pytest.mark.parametrize(
    ("name", "stream", "numbers", "said"),
    [
        ("a.bin", STREAM[:8], "uint16", "its 8 tokens are too few for a window of 8 and the token behind it"),
        ("a.bin", STREAM[:0], "uint16", "its 0 tokens are too few"),
        ("a.bin", STREAM[:9].astype(np.uint8), "uint16", "its 9 bytes are no multiple of 2, the bytes of a uint16"),
        ("a.bin", STREAM, None, "the file does not say of which type its numbers are"),
        ("a.npy", STREAM.astype(np.int32), "uint16", "holds int32, and data.format is uint16"),
        ("a.npy", STREAM.astype(np.float32), None, "holds float32, and the numbers of tokens are whole"),
        ("a.npy", STREAM.reshape(2, -1), None, r"holds an array of the shape \(2, 500\)"),
        ("a.npy", np.array([None, 1]), None, "is no array that NumPy can map: "),
        ("a.txt", STREAM, "uint16", "contains no stream files; found 1 .txt"),
    ],
)
def test_what_cannot_be_cut(tmp_path: Path, name: str, stream: np.ndarray, numbers: Any, said: str) -> None:
    if stream.dtype == object:
        np.save(tmp_path / name, stream, allow_pickle=True)
    else:
        _write(tmp_path / name, stream)
    with pytest.raises(DataError, match=said):
        windows_of(tmp_path, numbers, LENGTH, 1, scattered=True)


def test_an_address_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"data\.windows reads files of this machine"):
        windows_of("s3://bucket/train.bin", "uint16", LENGTH, 1, scattered=True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"pack": 16}, "data.pack: data.windows makes rows of its own, of tokens"),
        ({"image_size": [8, 8]}, "data.image_size: data.windows makes rows of its own"),
        ({"collate": "pad"}, "data.windows: all rows have 8 tokens already"),
        ({"collate": "pack"}, "data.windows: all rows have 8 tokens already"),
        ({"windows": None}, "data.format: a stream of uint16 has no rows until it is cut into windows"),
        ({"windows": None, "format": None, "stride": 8}, "data.stride: it is between windows, and there are none"),
        (
            {"path": None, "format": None, "windows": None, "mix": [{"path": "a", "format": "uint8", "weight": 1}] * 2},
            "data.mix: source 0: a stream of uint8 has no rows",
        ),
    ],
)
def test_what_does_not_go_together(data: dict[str, Any], said: str) -> None:
    given = {"path": "train.bin", "format": "uint16", "windows": LENGTH, "batch_size": 16, "shards": 4, **data}
    with pytest.raises(JobError) as caught:
        Job(name="x", task="t:T", steps=3, data=Data(**given))
    assert any(said in str(problem) for problem in caught.value.problems), caught.value


@pytest.mark.parametrize("data", [{"tokenizer": "saved"}, {"columns": ["x"]}])
def test_a_stream_of_numbers_holds_no_documents(file: Path, data: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"data.{next(iter(data))} is for documents"):
        training_data(job_of(file, **data), [])


def test_without_windows_a_stream_has_no_rows(file: Path) -> None:
    for path in (file, file.parent):
        with pytest.raises(DataError, match=r"(?s)holds no rows: .* set data\.windows"):
            training_data(job_of(path, windows=None, format=None), [])


@pytest.mark.parametrize("name", ["v.parquet", "t.bin.gz", "n.npz"])
def test_files_of_other_kinds_are_not_read_as_numbers(tmp_path: Path, name: str) -> None:
    STREAM.tofile(tmp_path / name)
    with pytest.raises(DataError, match=r"its name says that it holds more than numbers, and data\.format is uint16"):
        windows_of(str(tmp_path / name), "uint16", LENGTH, 1, scattered=True)


def test_an_array_of_no_bytes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.npy").touch()
    with pytest.raises(DataError, match="is no array that NumPy can map"):
        windows_of(str(tmp_path / "a.npy"), None, LENGTH, 1, scattered=True)
