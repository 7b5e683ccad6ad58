"""The audit of a mix finds every planted fault, names the source's files, and counts each source's own epochs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus import Data, Job
from raytrain_plus.audit.audit import audit
from raytrain_plus.audit.audit_mix import ExpectedMix
from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.ledger.ledger import NOTE, ROW_ID
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.order.mixed_order import apportioned, pattern_of
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.errors import InputError
from tests.support.ledgers import doubled_row, lost_row, lost_step, other_rows, run_of, swapped, write_data


def job_of(folder: Path, weights: list[float], *, steps: int, shards: int = 4, batch: int = 12, **data: object) -> Job:
    mix = [{"path": str(folder / str(number)), "weight": weight} for number, weight in enumerate(weights)]
    made = Data(mix=mix, batch_size=batch, shards=shards, **data)  # type: ignore[arg-type]
    return Job(name="run", task="a:B", data=made, steps=steps, storage=str(folder))


def notes_of(job: Job) -> list[np.ndarray]:
    """Return the notes of what the run's own reader delivers, step by step."""
    seen = training_data(job, [])
    rows = RowReader(source=seen, sample_order=sample_order_of(job, seen), seed=job.seed, transform=None, block_rows=4)
    made = [np.zeros(job.data.shards, NOTE) for _ in range(rows.sample_order.steps)]
    shards = range(job.data.shards)
    feed = Batches(
        rows, shards=shards, first_step=0, microbatches=1, collate=len, cache=UnitCache(rows, 0), make_stream=None
    )
    with feed:
        for step in range(rows.sample_order.steps):
            for shard, batches in feed.get(step, 10).shards.items():
                count = sum(batch.rows for batch in batches)
                ids = sum(batch.ids for batch in batches) % 2**64
                made[step][shard] = (batches[0].start, count, ids, count, 0.0, 0)
    return made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    write_data(tmp_path / "0", [37, 20, 1], 10)
    write_data(tmp_path / "1", [17], 10)
    return job_of(tmp_path, [3, 1], steps=10)


def test_a_clean_run_of_a_mix(job: Job) -> None:
    found = audit(run_of(job, notes_of(job)))
    assert found.faults == ()
    # Three quarters of 120 rows, of 58; a quarter, of 17.
    assert sum(epoch.due for epoch in found.epochs if epoch.source == 0) == 90
    assert [(epoch.source, epoch.epoch) for epoch in found.epochs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [epoch.due for epoch in found.epochs][::2] == [58, 17]
    assert all(epoch.once == epoch.due for epoch in found.epochs)
    assert found.clean
    assert found.lines()[2].endswith("/0): 58 rows")
    assert found.lines()[2].startswith("  source 0 (")
    assert found.lines()[5].endswith("/1): 17 rows")
    assert found.lines()[-1] == "  every row that was due was used exactly once"


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
def test_a_wrong_entry_of_a_mix_is_named(
    job: Job, plant: Callable[[list[np.ndarray]], None], words: str, never: int
) -> None:
    notes = notes_of(job)
    plant(notes)
    found = audit(run_of(job, notes))
    [fault] = [fault for fault in found.faults if fault.startswith(words)]
    assert fault.partition("position 9 (")[2].startswith("0/") or "were used (0/" in fault
    assert sum(epoch.never for epoch in found.epochs) == never
    assert not found.clean


def test_the_same_file_in_two_sources_has_two_sets_of_rows(tmp_path: Path) -> None:
    write_data(tmp_path / "0", [40], 10)
    mix = [{"path": str(tmp_path / "0"), "weight": 1}] * 2
    data = Data(mix=mix, batch_size=12, shards=4)
    job = Job(name="run", task="a:B", data=data, steps=10, storage=str(tmp_path))
    seen = training_data(job, [])
    ids = [number for unit in range(8) for number in seen.read_unit(unit).column(ROW_ID).to_pylist()]
    assert len(set(ids)) == 80
    found = audit(run_of(job, notes_of(job)))
    assert [(epoch.source, epoch.due) for epoch in found.epochs] == [(0, 40), (0, 20), (1, 40), (1, 20)]
    assert found.clean


@pytest.mark.parametrize("seed", [0, 1])
def test_a_mix_in_other_proportions_is_found(job: Job, seed: int) -> None:
    run = run_of(job, notes_of(job))
    text = (run / "job.yaml").read_text()
    assert "weight: 3" in text
    (run / "job.yaml").write_text(
        text.replace("weight: 3", "weight: 2") if seed else text.replace("seed: 0", "seed: 1")
    )
    assert len(audit(run).faults) >= 30


def test_an_unfinished_run_of_a_mix_is_audited_to_its_newest_step(job: Job) -> None:
    found = audit(run_of(job, notes_of(job)[:6], status=None))
    assert found.clean
    assert sum(epoch.due for epoch in found.epochs) == 72
    assert "(not finished)" in found.lines()[3]


def test_changed_files_are_named_by_their_source(job: Job) -> None:
    run = run_of(job, notes_of(job))
    mix = job.data.mix
    assert mix is not None
    pq.write_table(pa.table({"x": [1, 2]}), Path(mix[1]["path"]) / "0.parquet")
    (Path(mix[0]["path"]) / "2.parquet").unlink()
    write_data(Path(mix[1]["path"]) / "more", [3], 3)
    missing, new, changed = audit(run).faults
    assert missing == "0/2.parquet is missing; the run began with it"
    assert new == "1/more/0.parquet is new; the run began without it"
    assert changed.startswith("1/0.parquet has changed: ")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda then: then.pop("sources"), "`sources`: "),
        (lambda then: then["sources"].pop(), "it has 1 sources, and data.mix 2"),
        (
            lambda then: then["sources"][1].update(rows=18),
            "source 1: its row groups add up to 17 rows, but `rows` is 18",
        ),
        (lambda then: then["files"][3].update(path="7/0.parquet"), "source 1: its row groups add up to 0 rows"),
    ],
)
def test_a_damaged_description_of_a_mix_is_refused(
    job: Job, damage: Callable[[dict[str, object]], None], words: str
) -> None:
    run = run_of(job, notes_of(job))
    then = json.loads((run / "dataset.json").read_text())
    damage(then)
    (run / "dataset.json").write_text(json.dumps(then))
    with pytest.raises(InputError, match=words):
        audit(run)


@given(st.lists(st.one_of(st.integers(1, 10**6), st.floats(0.01, 1.0)), min_size=2, max_size=16))
def test_the_audits_own_pattern_is_the_documented_one(weights: list[float]) -> None:
    places = apportioned(weights)
    if min(places) == 0:
        # Refused in a job.
        return
    job = {
        "seed": 0,
        "steps": 1,
        "epochs": None,
        "data": {"shuffle": "none", "shards": 1, "batch_size": 1, "mix": [{"weight": one} for one in weights]},
    }
    files = [{"path": f"{number}/a", "row_groups": [1]} for number in range(len(weights))]
    expected = ExpectedMix(job, {"files": files})
    wanted = pattern_of(places)
    for source, counted in enumerate(expected._counted):
        assert np.array_equal(np.diff(counted), wanted == source)


@pytest.mark.timeout(600)
@given(
    shards=st.integers(1, 5),
    rows=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    group=st.sampled_from([1, 3, 100]),
    per_shard=st.integers(1, 6),
    steps=st.integers(1, 30),
    shuffle=st.sampled_from(["none", "units", "rows"]),
    odd=st.booleans(),
    data=st.data(),
)
def test_every_mix_is_clean_and_a_wrong_shard_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    shards: int,
    rows: list[int],
    group: int,
    per_shard: int,
    steps: int,
    shuffle: str,
    odd: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    for number, count in enumerate(rows):
        write_data(
            folder / str(number), [len(part) for part in np.array_split(np.arange(count), 2) if len(part)], group
        )
    numbers = st.floats(0.01, 1.0) if odd else st.integers(1, 7)
    weights = data.draw(st.lists(numbers, min_size=len(rows), max_size=len(rows)))
    job = job_of(folder, weights, steps=steps, shards=shards, batch=shards * per_shard, shuffle=shuffle)
    notes = notes_of(job)
    found = audit(run_of(job, notes))
    assert found.faults == ()
    assert found.clean
    assert sum(epoch.once for epoch in found.epochs) == steps * shards * per_shard
    step, shard = data.draw(st.integers(0, steps - 1)), data.draw(st.integers(0, shards - 1))
    notes[step][shard]["ids"] += 1
    (folder / "run").rename(folder / "clean")
    found = audit(run_of(job, notes))
    assert [fault.partition(":")[0] for fault in found.faults] == [f"step {step}, shard {shard}"]
    assert sum(epoch.never for epoch in found.epochs) == per_shard
