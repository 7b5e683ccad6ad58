"""The audit finds every planted fault, and none in a clean run."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus import Data, Job
from raytrain_plus.audit.audit import Audit, Epoch, audit
from raytrain_plus.data.ledger.ledger import SKIPPED, row_ids
from raytrain_plus.data.ledger.ledger_files import SCHEMA, LedgerFiles, ledger_table
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.benchmarks.audited import audited
from tests.support.ledgers import (
    doubled_row,
    job_of,
    lost_row,
    lost_step,
    notes_of,
    other_rows,
    record,
    run_of,
    swapped,
    write_data,
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    write_data(tmp_path / "data", [37, 20, 1], 10)
    return job_of(tmp_path)


def test_a_clean_run(job: Job) -> None:
    found = audit(run_of(job, notes_of(job)))
    assert found.faults == ()
    assert found.epochs == (Epoch(0, 58, 0, 58, 0), Epoch(1, 58, 0, 58, 0))
    assert (found.audited_to, found.steps, found.status) == (9, 10, "finished")
    assert found.lines()[-1] == "  every row that was due was used exactly once"
    assert found.to_json()["clean"] is True


@pytest.mark.parametrize(
    ("plant", "words", "never"),
    [
        (lost_row, "step 3, shard 1: used 2 rows from position 9, expected 3 rows from position 9 (", 3),
        (doubled_row, "step 3, shard 1: used 4 rows from position 9, expected 3 rows from position 9 (", 3),
        (other_rows, "step 3, shard 1: rows outside the sample order were used (", 3),
        (swapped, "step 3, shard 2: rows outside the sample order were used (", 6),
        (lost_step, "step 3, shard 0: used 0 rows from position 9, expected 3 rows from position 9 (", 12),
    ],
)
def test_a_wrong_entry_is_named(job: Job, plant: Callable[[list[np.ndarray]], None], words: str, never: int) -> None:
    notes = notes_of(job)
    plant(notes)
    found = audit(run_of(job, notes))
    assert any(fault.startswith(words) for fault in found.faults), found.faults
    assert sum(epoch.never for epoch in found.epochs) == never
    assert not found.clean


def test_a_row_that_was_used_twice_is_counted(job: Job) -> None:
    # The shard's next row is used twice: at the end of one step, with its own id, and again in the next step.
    notes = notes_of(job)
    table = pa.concat_tables([pq.read_table(file) for file in sorted((run_of(job, notes) / "ledger").iterdir())])
    seen = parquet_source(job.data.path)
    rows = RowReader(source=seen, sample_order=sample_order_of(job, seen), seed=0, transform=None, block_rows=4)
    [row_range, *_] = rows.sample_order.row_ranges_between(1, 12, 13)
    notes[3][1]["rows"] += 1
    more = rows.read(row_range).column("_raytrain_id").to_pylist()[0]
    notes[3][1]["ids"] = (int(notes[3][1]["ids"]) + more) % 2**64
    found = audit(run_of(replace(job, name="other"), notes))
    assert sum(epoch.more for epoch in found.epochs) == 1
    assert sum(epoch.never for epoch in found.epochs) == 0
    assert len(found.faults) == 1
    assert table.num_rows == 40


def many_shards(folder: Path, shards: int) -> Job:
    write_data(folder / "data", [5 * shards, 7], 10)
    return job_of(folder, data=Data(path=str(folder / "data"), batch_size=2 * shards, shards=shards))


@pytest.mark.parametrize("shards", [8, 12, 196, pytest.param(300, marks=pytest.mark.slow)])
def test_the_step_sum_detects_a_row_that_the_shards_bits_miss(tmp_path: Path, shards: int) -> None:
    job = many_shards(tmp_path, shards)
    notes = notes_of(job)
    assert audit(run_of(replace(job, name="right"), notes)).clean
    notes[2][5]["ids"] ^= np.uint64(1 << 60)
    found = audit(run_of(job, notes))
    [fault] = found.faults
    assert fault.startswith("step 2: rows outside the sample order were used")
    assert sum(epoch.never for epoch in found.epochs) == 2 * shards


@pytest.mark.parametrize("shards", [64, 300])
def test_shards_that_read_each_others_rows_are_seen(tmp_path: Path, shards: int) -> None:
    job = many_shards(tmp_path, shards)
    notes = notes_of(job)
    notes[2]["ids"][[5, 6]] = notes[2]["ids"][[6, 5]]
    found = audit(run_of(job, notes))
    assert {fault.partition(":")[0].partition(",")[0] for fault in found.faults} == {"step 2"}
    assert sum(epoch.never for epoch in found.epochs) == (4 if shards == 64 else 2 * shards)


def test_a_step_without_a_sum_is_reported(job: Job) -> None:
    run = run_of(job, notes_of(job))
    [part] = (run / "ledger").iterdir()
    table = pq.read_table(part)
    sums = [None if number % 10 == 4 else value for number, value in enumerate(table.column("step_ids").to_pylist())]
    pq.write_table(table.set_column(7, SCHEMA.field("step_ids"), pa.array(sums, pa.uint64())), part)
    found = audit(run)
    assert found.faults == ("step 4: expected exactly one step sum in the ledger",)
    assert not found.clean


def test_a_missing_shard_says_nothing_of_the_others(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes)
    [part] = (run / "ledger").iterdir()
    table = pq.read_table(part)
    pq.write_table(table.filter((pc.field("step") != 4) | (pc.field("shard") != 2)), part)
    found = audit(run)
    [fault] = found.faults
    assert fault.startswith("step 4 of shard 2 is missing from the ledger")
    assert sum(epoch.never for epoch in found.epochs) == 3


def test_a_step_that_was_entered_twice(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes)
    pq.write_table(ledger_table([(1, 4, notes[4].tobytes(), b"")]), run / "ledger" / "00000001-000000000004.parquet")
    record(run, 1, resumed=9)
    found = audit(run)
    assert found.faults[0] == "step 4 of shard 0 is in the ledger more than once (1.parquet)"
    assert sum(epoch.more for epoch in found.epochs) == 12


def test_a_step_that_is_missing(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes)
    [part] = (run / "ledger").iterdir()
    table = pq.read_table(part)
    pq.write_table(table.filter(pa.compute.not_equal(table.column("step"), 4)), part)
    found = audit(run)
    assert found.faults[0] == "step 4 of shard 0 is missing from the ledger (1.parquet)"
    assert sum(epoch.never for epoch in found.epochs) == 12


def test_a_step_beyond_the_last(job: Job) -> None:
    notes = notes_of(job)
    found = audit(run_of(job, [*notes, notes[0]], status=None))
    assert not found.clean
    notes = notes_of(job)
    found = audit(run_of(replace(job, name="other", steps=8, epochs=None), notes[:8]))
    assert found.clean


def test_a_new_a_missing_and_a_changed_file(job: Job) -> None:
    run = run_of(job, notes_of(job))
    data = Path(job.data.path)
    (data / "0.parquet").rename(data / "new.parquet")
    write_data(data / "made", [20], 9)
    (data / "made" / "0.parquet").replace(data / "1.parquet")
    found = audit(run)
    assert [fault.partition(" ")[0] for fault in found.faults] == ["0.parquet", "new.parquet", "1.parquet"]
    assert "is missing" in found.faults[0]
    assert "is new" in found.faults[1]
    assert "has changed" in found.faults[2]


def test_the_data_of_a_pattern(job: Job) -> None:
    folder = Path(job.data.path)
    matched = replace(job, data=replace(job.data, path=str(folder / "[0-9]*.parquet")))
    run = run_of(matched, notes_of(matched))
    write_data(folder / "aside", [3], 3)
    assert audit(run).clean
    (folder / "1.parquet").rename(folder / "7.parquet")
    assert [fault.partition(";")[0] for fault in audit(run).faults] == ["1.parquet is missing", "7.parquet is new"]
    folder.rename(folder.parent / "moved")
    assert audit(run).faults == (f"the dataset no longer exists: {matched.data.path}",)


def test_a_dataset_that_cannot_be_accessed(job: Job) -> None:
    run = run_of(job, notes_of(job))
    then = json.loads((run / "dataset.json").read_text())
    (run / "dataset.json").write_text(json.dumps({**then, "path": "/" + "x" * 300}))
    assert "cannot be accessed: File name too long" in audit(run).faults[0]


def test_a_file_that_has_changed_without_a_change_of_size(tmp_path: Path) -> None:
    def write(first: int) -> None:
        table = pa.table({"x": pa.array(np.arange(first, first + 50, dtype=np.int64))})
        pq.write_table(table, tmp_path / "data" / "0.parquet", compression="none", use_dictionary=False)

    (tmp_path / "data").mkdir()
    write(0)
    job = job_of(tmp_path)
    run = run_of(job, notes_of(job))
    size = (tmp_path / "data" / "0.parquet").stat().st_size
    write(7)
    assert (tmp_path / "data" / "0.parquet").stat().st_size == size
    assert audit(run).faults == ("0.parquet has changed: its footer differs",)


def test_a_torn_part(job: Job) -> None:
    run = run_of(job, notes_of(job))
    [part] = (run / "ledger").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    found = audit(run)
    assert found.faults[0].startswith(f"ledger/{part.name} cannot be read")
    assert found.audited_to == 9
    assert [epoch.never for epoch in found.epochs] == [58, 58]
    pq.write_table(pa.table({name: ["x"] for name in SCHEMA.names}), part)
    assert audit(run).faults[0].startswith(f"ledger/{part.name} cannot be read")


def test_a_flipped_bit_in_a_part_is_found_and_names_it(job: Job) -> None:
    run = run_of(job, notes_of(job))
    [part] = (run / "ledger").iterdir()
    chunk = pq.read_metadata(part).row_group(0).column(SCHEMA.names.index("ids"))
    data = bytearray(part.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
    part.write_bytes(data)
    assert audit(run).faults[0].startswith(f"ledger/{part.name} cannot be read: could not verify page integrity")


def test_impossible_entries_are_reported(job: Job) -> None:
    notes = notes_of(job)
    notes[3][1]["start"], notes[4][2]["rows"], notes[5][3]["rows"] = 2**62, 2**62, -5
    run = run_of(job, notes)
    pq.write_table(ledger_table([(0, 2**61, notes[0].tobytes(), b"")]), run / "ledger" / "x.parquet")
    found = audit(run)
    assert found.faults[0] == f"step {2**61} of shard 0 was never due"
    assert len(found.faults) == 4 + 3
    assert sum(epoch.never for epoch in found.epochs) == 9


@pytest.mark.parametrize("file", ["job.yaml", "dataset.json"])
@pytest.mark.parametrize("text", ["", "{torn", "a: [", "{}"])
def test_a_run_of_another_kind(job: Job, file: str, text: str) -> None:
    run = run_of(job, notes_of(job))
    (run / file).write_text(text)
    with pytest.raises(InputError, match=f"run/{file}") as caught:
        audit(run)
    assert str(caught.value).startswith(str(run))
    (run / file).unlink()
    with pytest.raises(InputError, match=f"there is no run to audit: FileNotFoundError: .*{file}"):
        audit(run)


def test_a_torn_result_and_a_missing_ledger(job: Job) -> None:
    run = run_of(job, notes_of(job))
    (run / "result.json").write_text("{")
    assert [fault.partition(":")[0] for fault in audit(run).faults] == ["result.json cannot be read"]
    (run / "result.json").unlink()
    assert audit(run).clean
    shutil.rmtree(run / "ledger")
    assert audit(run).lines()[-1] == "  the ledger has no entries yet: nothing to audit"
    checkpoint = run / "checkpoints" / "000000000005-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "00000-of-00001.safetensors").touch()
    assert audit(run).clean
    checkpoint.with_suffix(".json").touch()
    record(run, 2, resumed=9)
    found = audit(run)
    assert found.faults[0] == "the ledger is missing"
    assert found.faults[1].startswith("every step from 0 to 5 of shard 0 is missing from the ledger (")
    assert sum(epoch.never for epoch in found.epochs) == 6 * 12


def test_a_run_that_ended_early_is_judged_up_to_its_last_step(job: Job) -> None:
    run = run_of(job, notes_of(job)[:6], status=None)
    said = {"status": "finished", "steps": 6}
    (run / "result.json").write_text(json.dumps(said))
    assert audit(run).faults[0] == "the run finished with 6 steps; the job has 10"
    (run / "result.json").write_text(json.dumps({**said, "stopped_early": "loss has not improved since step 2"}))
    assert (audit(run).clean, audit(run).audited_to) == (True, 5)
    record(run, 0, 6)
    written = LedgerFiles(LocalFolder(run))
    written.add(0, 6, notes_of(job)[6].tobytes(), b"")
    written.close()
    assert not audit(run).clean, "what was made after the end was not due"


def test_a_checkpoint_that_lacks_parameters_of_others_is_a_fault(job: Job) -> None:
    run = run_of(job, notes_of(job))
    (run / "checkpoints").mkdir()
    for name, tensors in (
        ("000000000003-00000000", {f"param/{letter}": {} for letter in "abcde"}),
        ("000000000006-00000000", {"param/a": {}, "optim/b/m": {}}),
        ("000000000009-00000000", {f"param/{letter}": {} for letter in "abcde"}),
    ):
        (run / "checkpoints" / f"{name}.json").write_text(json.dumps({"tensors": tensors}))
    assert audit(run).faults == (
        "checkpoints/000000000006-00000000.json is incomplete: it lacks 4 of 5 parameters: b, c, d and 1 more",
    )


def test_a_lost_tail_of_a_run_that_was_killed(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes[:5], status=None)
    tail = run / "ledger" / "00000001-000000000005.parquet"
    pq.write_table(ledger_table([(1, step, notes[step].tobytes(), b"") for step in (5, 6, 7)]), tail)
    record(run, 1, 5, 6, 7)
    (run / "checkpoints").mkdir()
    for name in ("000000000003-00000000.json", "000000000006-00000001.json", "000000000009-00000001"):
        (run / "checkpoints" / name).touch()
    assert (audit(run).clean, audit(run).audited_to) == (True, 7)
    tail.unlink()
    found = audit(run)
    assert [fault.partition(" (")[0] for fault in found.faults] == [
        f"every step from 5 to 6 of shard {shard} is missing from the ledger" for shard in range(4)
    ]
    assert (found.audited_to, sum(epoch.never for epoch in found.epochs)) == (6, 24)
    # If a later generation resumes from an earlier step, the checkpoint is void, as are the entries after that step.
    record(run, 2, resumed=3)
    assert (audit(run).clean, audit(run).audited_to) == (True, 3)


def test_a_ledger_wrong_in_every_entry_gets_a_short_report(job: Job) -> None:
    job = replace(job, epochs=None, steps=500)
    notes = notes_of(job)
    for of_step in notes:
        of_step["ids"] += 1
        of_step["start"][0] += 1
    run = run_of(job, notes, status=None)
    beyond = [(0, 1000 + 2 * step, notes[0].tobytes(), b"") for step in range(500)]
    pq.write_table(ledger_table(beyond), run / "ledger" / "x.parquet")
    found = audit(run)
    assert found.num_faults == 4 * 500 + 4 * 500
    kinds = ("was never due", "rows from", "rows outside the sample order")
    assert [sum(kind in fault for fault in found.faults) for kind in kinds] == [100, 100, 100]
    assert found.lines()[-1] == "  and 3,980 more faults; --json lists 300 of them"
    assert len(json.dumps(found.to_json())) < 100_000
    assert not found.clean


def test_a_live_run_is_audited_up_to_its_newest_step(job: Job) -> None:
    found = audit(run_of(job, notes_of(job)[:6], status=None))
    assert found.clean
    assert (found.audited_to, found.status) == (5, "unfinished")
    assert found.epochs == (Epoch(0, 58, 0, 58, 0), Epoch(1, 14, 0, 14, 0))
    assert "(not finished)" in found.lines()[3]


def test_a_finished_run_must_have_every_step_in_the_ledger(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes[:8])
    found = audit(run)
    assert found.faults[0] == "the run finished with 8 steps; the job has 10"
    assert found.faults[1].startswith("every step from 8 to 9 of shard 0 is missing from the ledger (")
    assert not audit(run_of(replace(job, name="more", steps=8, epochs=None), notes[:9])).clean


def test_entries_made_void_by_a_total_loss_do_not_count(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes[:7], status=None)
    entries = [(5, step, notes[step].tobytes(), b"") for step in range(4, 10)]
    pq.write_table(ledger_table(entries), run / "ledger" / "00000005-000000000004.parquet")
    recorded = (run / "events.ndjson").read_text()
    record(run, 5, *range(7, 10))
    assert audit(run).faults[0] == "every step from 4 to 6 of shard 0 is in the ledger more than once (1.parquet)"
    (run / "events.ndjson").write_text(recorded)
    record(run, 5, *range(4, 10), resumed=3)
    assert audit(run).clean
    assert audit(run).audited_to == 9


def test_events_that_are_cut_off_accuse_no_rows(job: Job) -> None:
    notes = notes_of(job)
    run = run_of(job, notes[:7], status=None)
    # The last steps of the first controller never reached the ledger.
    part = run / "ledger" / "00000000-000000000000.parquet"
    pq.write_table(ledger_table([(0, step, notes[step].tobytes(), b"") for step in range(6)]), part)
    resumed = ledger_table([(5, step, notes[step].tobytes(), b"") for step in range(4, 10)])
    pq.write_table(resumed, run / "ledger" / "00000005-000000000004.parquet")
    record(run, 5, *range(4, 10), resumed=3)
    events = (run / "events.ndjson").read_text().splitlines(keepends=True)
    for ended in ("", json.dumps({"status": "finished", "steps": 10})):
        if ended:
            (run / "result.json").write_text(ended)
        (run / "events.ndjson").write_text("".join(events))
        assert audit(run).clean
        for kept in range(len(events)):
            (run / "events.ndjson").write_text("".join(events[:kept]))
            found = audit(run)
            [only] = found.faults
            step = kept if kept <= 7 else kept - 4
            assert only.startswith(f"the record (events.ndjson) is incomplete from step {step} on: "), kept
            assert (found.clean, sum(epoch.never + epoch.more for epoch in found.epochs)) == (False, 0)


def test_a_wrong_row_before_the_cut_is_still_named(job: Job) -> None:
    notes = notes_of(job)
    other_rows(notes)
    run = run_of(job, notes)
    lines = (run / "events.ndjson").read_text().splitlines(keepends=True)
    (run / "events.ndjson").write_text("".join(lines[:5]))
    first, second, *_ = audit(run).faults
    assert first.startswith("the record (events.ndjson) is incomplete from step 5 on: it ends at step 4, but the run ")
    assert second.startswith("step 3, shard 1: rows outside the sample order were used (")


def test_a_run_on_an_object_store(job: Job, bucket: Folder, tmp_path: Path) -> None:
    notes = notes_of(job)
    run = bucket.inside(tmp_path.name).inside("run")
    local = run_of(job, notes[:7], status=None)
    for name in ("job.yaml", "dataset.json"):
        run.write(name, [(local / name).read_bytes()])
    for generation, steps in ((0, range(7)), (5, range(4, 10))):
        written = LedgerFiles(run)
        for step in steps:
            written.add(generation, step, notes[step].tobytes(), b"")
        written.close()
    log = EventLog(run)

    def commits(generation: int, *steps: int) -> None:
        for step in steps:
            fields = {"step": step, "epoch": 0, "samples": 12, "loss": 1.0, "grad_norm": 1.0, "seconds": 0.1}
            log.write("step_committed", generation=generation, fields=fields)
        log.sync()

    commits(0, *range(7))
    [only] = audit(run.address).faults
    assert only.startswith("the record (events.ndjson) is incomplete from step 7 on: it ends at step 6, but the run ")
    log.write("resumed", generation=5, fields={"step": 3, "checkpoint": "x", "voided_to": 6})
    commits(5, *range(4, 10))
    log.close()
    found = audit(run.address)
    assert (found.clean, found.run, found.audited_to, found.status) == (True, "run", 9, "unfinished")


def test_there_is_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run to audit"):
        audit(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "least"),
    [
        # Fewer rows than files, as many rows in each shard, and one more or less.
        (list(itertools.product((4, 5, 11), (1, 3, 7))), 10),
        pytest.param(list(itertools.product(range(4, 14), range(1, 8))), 100, marks=pytest.mark.slow),
    ],
    ids=["a few", "all"],
)
def test_every_small_number_of_rows_and_files_is_clean(job: Job, numbers: list[tuple[int, int]], least: int) -> None:
    job = replace(job, epochs=3)
    straddling = 0
    for rows, files in numbers:
        shutil.rmtree(job.storage)
        # With more files than rows, some files are empty.
        sizes = [len(part) for part in np.array_split(np.arange(rows), files)]
        write_data(Path(job.data.path), sizes, 1)
        notes = notes_of(job, cache_mb=1)
        found = audit(run_of(job, notes))
        assert found.faults == (), (rows, sizes)
        assert found.epochs == tuple(Epoch(number, rows, 0, rows, 0) for number in range(3)), (rows, sizes)
        # Shard k has had ceil((e N - k) / M) rows before epoch e.
        edges = {(shard, math.ceil((epoch * rows - shard) / 4)) for shard in range(4) for epoch in (1, 2)}
        for of_step in notes:
            inside = {
                (shard, at)
                for shard, note in enumerate(of_step)
                for at in range(int(note["start"]) + 1, int(note["start"] + note["rows"]))
            }
            straddling += not edges.isdisjoint(inside)
    assert straddling > least


@pytest.mark.timeout(600)
@given(
    shards=st.integers(1, 5),
    extra=st.integers(0, 11),
    files=st.integers(1, 7),
    group=st.sampled_from([1, 3, 100]),
    per_shard=st.integers(1, 4),
    epochs=st.integers(1, 4),
    shuffle=st.sampled_from(["none", "units", "rows"]),
    seed=st.integers(0, 3),
)
def test_every_size_of_dataset_is_clean(
    tmp_path_factory: pytest.TempPathFactory,
    shards: int,
    extra: int,
    files: int,
    group: int,
    per_shard: int,
    epochs: int,
    shuffle: str,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    rows = shards + min(extra, 2 * shards + 1)
    sizes = [len(part) for part in np.array_split(np.arange(rows), files) if len(part)]
    write_data(folder / "data", sizes, group)
    data = Data(path=str(folder / "data"), batch_size=shards * per_shard, shards=shards, shuffle=shuffle)  # type: ignore[arg-type]
    job = job_of(folder, data=data, epochs=epochs, seed=seed)
    found: Audit = audit(run_of(job, notes_of(job)))
    assert found.faults == ()
    assert [epoch.once for epoch in found.epochs] == [rows] * epochs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_million_rows(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    column = pa.array(np.zeros(10_000_000, dtype=np.int8))
    for number in range(10):
        part = pa.table({"x": column.slice(number * 1_000_000, 1_000_000)})
        pq.write_table(part, tmp_path / "data" / f"{number}.parquet", row_group_size=10_000)
    data = Data(path=str(tmp_path / "data"), batch_size=1200, shards=12)
    job = job_of(tmp_path, data=data, epochs=1)
    run = run_of(job, notes_of(job))
    took, peak_mb, clean = audited(run)
    print(f"10 million rows audited in {took:.1f} s and {peak_mb:.0f} MiB")
    assert clean
    assert peak_mb < 1024


@pytest.mark.parametrize("line", ['{"kind": "resumed", "step', '{"kind": "resumed", "step": 3}'])
def test_a_damaged_resumed_event_is_refused(tmp_path: Path, line: str) -> None:
    write_data(tmp_path / "data", [40, 33], 8)
    job = job_of(tmp_path)
    run = run_of(job, notes_of(job))
    (run / "events.ndjson").write_text(line + "\n")
    with pytest.raises(InputError, match="a `resumed` event is damaged"):
        audit(run)


def skipping(job: Job) -> tuple[Job, list[np.ndarray], list[bytes]]:
    """Return notes of a run that skipped two rows of the first file wherever they came: rows 3 and 12 of it."""
    job = replace(job, data=replace(job.data, on_error="skip"))
    seen = parquet_source(job.data.path)
    order = sample_order_of(job, seen)
    notes, skipped = notes_of(job), []
    for step, of_step in enumerate(notes):
        found = []
        for shard in range(order.shards):
            offset = 0
            for part in order.row_ranges(shard, step):
                places = order.permutation(part.epoch, part.unit)
                assert places is not None
                for place in places[part.start : part.start + part.rows].tolist():
                    if (part.unit, place) in {(0, 3), (1, 2)}:
                        row = int(row_ids("0.parquet", part.unit, 10)[place])
                        of_step[shard]["ids"] = (int(of_step[shard]["ids"]) - row) % 2**64
                        of_step[shard]["rows"] -= 1
                        of_step[shard]["skipped"] += 1
                        found.append((shard, offset))
                    offset += 1
        skipped.append(np.array(found, SKIPPED).tobytes())
    return job, notes, skipped


def run_that_skipped(job: Job, notes: list[np.ndarray], skipped: list[bytes]) -> Path:
    run = run_of(job, notes)
    entries = [(0, step, of_step.tobytes(), skipped[step]) for step, of_step in enumerate(notes)]
    [part] = (run / "ledger").iterdir()
    pq.write_table(ledger_table(entries), part)
    return run


def test_skipped_rows_are_counted_and_named(job: Job) -> None:
    found = audit(run_that_skipped(*skipping(job)))
    assert found.faults == ()
    assert found.clean
    assert found.epochs == (Epoch(0, 58, 0, 56, 0, None, 2), Epoch(1, 58, 0, 56, 0, None, 2))
    named = {"row 3 of 0.parquet, row group 0", "row 2 of 0.parquet, row group 1"}
    assert (found.skipped.times, found.skipped.rows, set(found.skipped.named)) == (4, 2, named)
    assert "  skipped, because they cannot be used: 2 rows, 4 times in all" in found.lines()
    assert found.lines()[-1] == "  every row that was due was used exactly once, or skipped"


def first_with(skipped: list[bytes]) -> tuple[int, int, int]:
    """Return step, shard and offset of the first skipped row."""
    step = next(step for step, rows in enumerate(skipped) if rows)
    return step, *np.frombuffer(skipped[step], SKIPPED)[0].tolist()


def another_row(notes: list[np.ndarray], skipped: list[bytes]) -> None:
    step, shard, offset = first_with(skipped)
    skipped[step] = np.array([(shard, (offset + 1) % 3)], SKIPPED).tobytes()


def neither(notes: list[np.ndarray], skipped: list[bytes]) -> None:
    step, shard, _ = first_with(skipped)
    notes[step][shard]["skipped"] = 0
    skipped[step] = b""


def both(notes: list[np.ndarray], skipped: list[bytes]) -> None:
    step, shard, offset = first_with(skipped)
    notes[step][shard]["skipped"] = 2
    skipped[step] = np.array([(shard, offset), (shard, offset)], SKIPPED).tobytes()


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (another_row, "rows outside the sample order were used"),
        (neither, "used 2 rows from position"),
        (both, "the ledger does not say which 2 of 4 rows were skipped"),
    ],
)
def test_a_row_is_used_or_skipped_never_both_or_neither(
    job: Job, plant: Callable[[list[np.ndarray], list[bytes]], None], words: str
) -> None:
    job, notes, skipped = skipping(job)
    plant(notes, skipped)
    found = audit(run_that_skipped(job, notes, skipped))
    assert not found.clean
    assert any(words in fault for fault in found.faults), found.faults


def test_a_row_that_one_epoch_skipped_and_another_used_is_a_fault_unless_a_transform_decides(job: Job) -> None:
    job, notes, skipped = skipping(job)
    step, shard, _ = first_with(skipped)
    used = notes_of(job)[step][shard]
    notes[step][shard] = used
    rest = np.frombuffer(skipped[step], SKIPPED)
    skipped[step] = rest[rest["shard"] != shard].tobytes()
    found = audit(run_that_skipped(job, notes, skipped))
    [fault] = found.faults
    assert fault.endswith("was used in epoch 0 and skipped in another one, although it is read alike in all epochs")
    assert not found.clean
    other = replace(job, name="transformed", data=replace(job.data, transform="a:b"))
    assert audit(run_that_skipped(other, notes, skipped)).clean


def test_rows_must_not_be_skipped_if_the_job_stops_for_them(job: Job) -> None:
    _, notes, skipped = skipping(job)
    found = audit(run_that_skipped(job, notes, skipped))
    assert "rows were skipped, although data.on_error is stop" in found.faults[0]
