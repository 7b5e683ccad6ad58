"""Fuzz jobs, Parquet files and run folders: no damage may give a traceback, hang, or be read as something else.

Each fault that fuzzing found is kept below as a case, with a comment on what went wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import DataChanged, DataError, JobError
from raytrain_plus.job.yaml import load_job
from raytrain_plus.observe.run_events import _SHAPES, FIELDS
from raytrain_plus.storage import json_shape as has
from tests.unit.fuzz import folders, jobs
from tests.unit.fuzz.again import KINDS, found
from tests.unit.fuzz.verdict import raytrain

FEW = {"jobs": 8, "parquet": 30, "folders": 5}
MANY = {"jobs": 20_000, "parquet": 2_000, "folders": 1_000}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few(kind: str, tmp_path: Path) -> None:
    came = found(kind, 0, FEW[kind], tmp_path)
    assert came.total() == FEW[kind]
    assert len(came) > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many(kind: str) -> None:
    """Other seeds than `test_a_few`, on all cores; a process that crashes in a library fails the test."""
    cores = os.cpu_count() or 1
    bounds = [FEW[kind] + part * MANY[kind] // cores for part in range(cores + 1)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.fuzz.again", kind, str(first), str(last)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for first, last in itertools.pairwise(bounds)
    ]
    said = [process.communicate()[0] for process in running]
    faults = [text[-4000:] for process, text in zip(running, said, strict=True) if process.returncode]
    assert not faults, "\n".join(faults)


# Jobs.

GOOD = f"task: {jobs.TASK}\nsteps: 2\ndata: {{path: data, batch_size: 8}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        # Tracebacks: the tag forced a conversion to a number.
        ("seed: !!int abc", [], "job.yaml:4:7 seed: 'abc' does not match its tag !!int\n  expected: digits"),
        ("clip_norm: !!float x", [], "job.yaml:4:12 clip_norm: 'x' does not match its tag !!float"),
        ("", ["seed=!!int 1_0"], "seed: '1_0' does not match its tag !!int"),
        # Read as false, and as null.
        ("args: {x: !!bool maybe}", [], "job.yaml:4:11 args.x: 'maybe' does not match its tag !!bool"),
        ("args: {x: !!null x}", [], "args.x: 'x' does not match its tag !!null"),
        # All tags of collections were ignored.
        ("args: {x: !!seq {a: 1}}", [], "job.yaml:4:11 args.x: the tag tag:yaml.org,2002:seq is not allowed"),
        (
            "args: {x: !!python/object:os.system {a: 1}}",
            [],
            "the tag tag:yaml.org,2002:python/object:os.system is",
        ),
        ("args: {x: !!set {a}}", [], "args.x: the tag tag:yaml.org,2002:set is not allowed"),
        # Read as a number, although YAML makes it text.
        ("args: {x: ! 5}", [], "job.yaml:4:11: is not valid YAML: the tag ! is not allowed"),
        # Tracebacks: RecursionError.
        ("", [f"args.x={'[' * 3000}"], "--set args.x:1:34: is too large for a job: it has more than"),
        ("", [f"args.x={'{a: ' * 3000}"], "nested more than 32 levels deep"),
        (f"args: {'[' * 3000}", [], "job.yaml:4:39: is too large for a job"),
        # Tracebacks: OverflowError, ValueError, from an escape.
        ('args: {x: "\\UFFFFFFFF"}', [], "is not valid YAML: an escape is not a valid character"),
        ('args: {x: "\\U00110000"}', [], "is not valid YAML: an escape is not a valid character"),
        # Accepted, and a traceback later, when it was written or printed.
        ('args: {x: "\\uD800"}', [], "job.yaml:4:11 args.x: the text is not UTF-8, or holds half of a surrogate pair"),
        ("", ['data.path="\\uDFFF"'], "data.path: the text is not UTF-8, or holds half"),
        # Read as an ordinary key, so that the task's constructor was called with `<<`.
        ("args: {<<: {width: 3}}", [], "job.yaml:4:8 args.<<: merge keys are not supported"),
        # `validate` counted up to them, for hours.
        ("workers: {max: 4294967296}", ["data.shards=4294967296", "data.batch_size=4294967296"], "at most 100,000"),
        (
            "parallel: {pipeline: 4294967296}",
            [],
            "pipeline: 4294967296 is not allowed\n  expected: at most 1,000",
        ),
        # Steps times rows overflowed 64 bits; timeouts overflowed the clock.
        ("", ["steps=9223372036854775807"], "expected: at most 1,000,000,000"),
        (
            "elastic: {wait_s: 1e308}",
            [],
            "1e+308 is not allowed\n  expected: at most 1,000,000,000 seconds",
        ),
        ("workers: {cpus: 1e308}", [], "workers.cpus: 1e+308 is not allowed"),
        (f"args: {{x: {'9' * 101}}}", [], "args.x: the number is too long"),
    ],
)
def test_a_job(text: str, overrides: list[str], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD + text)
    with pytest.raises(JobError) as caught:
        load_job(file, overrides)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 2000
    code, out, err = raytrain("validate", file, *(word for one in overrides for word in ("--set", one)))
    assert (code, out) == (2, "")
    assert err.strip() == str(caught.value)


def test_overrides_that_are_not_yaml_are_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    for text in ("a: b: c", "@x", '"\\U00110000"', "[1"):
        assert load_job(file, [f"args.x={text}"])[0].args == {"x": text}


# Parquet files.


def test_a_column_whose_name_is_damaged(tmp_path: Path) -> None:
    """A traceback: UnicodeDecodeError, which is not one of pyarrow's own errors."""
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"é": np.arange(4)}), file, store_schema=False)
    seen = parquet_source(tmp_path)
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xc3("))
    with pytest.raises(DataError, match="is not a readable Parquet file"):
        parquet_source(tmp_path)
    with pytest.raises(DataChanged, match="its footer changed"):
        seen.read_unit(0)


# Run folders.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[folders.Base]:
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("base")
    os.chdir(folder)
    yield folders.base_in(folder)
    os.chdir(before)


@pytest.fixture
def run(base: folders.Base) -> Iterator[Path]:
    folder = base.folder.with_name("one")
    shutil.copytree(base.folder, folder)
    with folders.expired_at_once():
        yield folder
    shutil.rmtree(folder)


def put(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return a change of some of a document's values."""

    def act(run: Path) -> None:
        path = run / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return act


def told(kind: str, **changes: Any) -> Callable[[Path], None]:
    """Return a change of some fields of the first event of a kind; fields set to `...` are removed."""

    def act(run: Path) -> None:
        lines = [json.loads(line) for line in (run / "events.ndjson").read_text().splitlines()]
        first = next(line for line in lines if line["kind"] == kind)
        first |= changes
        for name in [name for name, value in first.items() if value is ...]:
            del first[name]
        (run / "events.ndjson").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    return act


def text(file: str, content: bytes) -> Callable[[Path], None]:
    """Return a change that replaces a file's bytes."""

    def act(run: Path) -> None:
        (run / file).write_bytes(content)

    return act


def forged(**changes: Any) -> Callable[[Path], None]:
    """Return a change of some fields of the newest manifest, with its hash updated."""

    def act(run: Path) -> None:
        file = run / "checkpoints" / "000000000007-00000000.json"
        file.write_bytes(folders.hashed({**json.loads(file.read_bytes()), **changes}))

    return act


DEEP, LONG = b"[" * 100_000, b"1" * 5000


@pytest.mark.parametrize(
    ("damage", "verb", "code", "expected"),
    [
        # Each was a traceback.
        (
            text("dataset.json", b"{}"),
            "audit",
            2,
            "one/dataset.json, line 1: the file is damaged: the field 'path' is missing",
        ),
        (
            put("dataset.json", path=[1]),
            "audit",
            2,
            "dataset.json, line 1: the file is damaged: path: a list",
        ),
        (put("dataset.json", path="\0"), "audit", 2, "path: '\\x00' contains an invalid character"),
        (put("dataset.json", path="\ud800"), "audit", 2, "path: '\\ud800' contains an invalid character"),
        (put("dataset.json", files=[{"path": 1.5}]), "audit", 2, "files: entry 0: path: 1.5 is not a string"),
        (text("dataset.json", DEEP), "audit", 2, "dataset.json, line 1: the file is damaged: RecursionError"),
        (text("job.yaml", b"a: " + DEEP), "audit", 2, "one/job.yaml:1:36: is too large for a job"),
        (text("result.json", DEEP), "audit", 1, "result.json cannot be read"),
        (
            put("result.json", metrics=7),
            "status",
            2,
            "not a valid result for this version: metrics: 7",
        ),
        (
            text("result.json", b'{"a": ' + LONG + b"}"),
            "status",
            2,
            "line 1: the file is damaged: ValueError",
        ),
        (put("result.json", stall_s=[]), "attach", 2, "stall_s: a list is not a finite number"),
        (put("result.json", recoveries="7"), "attach", 2, "recoveries: '7' is not an integer from 0 up"),
        (text("lease.json", DEEP), "status", 0, "one: finished"),
        (put("lease.json", time=[]), "status", 0, "one: finished"),
        (text("claims/00000001.json", DEEP), "status", 0, "one: finished"),
        (forged(generation=0.0), "status", 0, "complete"),
        (forged(step="7"), "status", 0, "step: '7' is not an integer from 0 up"),
        (forged(time=[1]), "status", 0, "time: a list is not a finite number"),
        (forged(tensors=[]), "status", 0, "tensors: a list is not an object"),
        (forged(tree=None), "export", 0, "the model after step 4"),
        (forged(tree={"persistent": None}), "export", 0, "the model after step 4"),
        (
            told("step_committed", loss=None),
            "logs",
            2,
            "line 5: the file is damaged: loss: None is not a number",
        ),
        (told("drain_notice", node=7), "logs", 2, "node: 7 is not a string"),
        (told("view_formed", members=[{"worker": "w"}]), "logs", 2, "members: entry 0: the field 'replica' is missing"),
        (told("view_formed", members=[]), "logs", 2, "members: the list is empty"),
        (told("worker_lost", time=1e300), "logs", 2, "time: 1e+300 is out of range"),
        (told("rescaled", to=True), "logs", 2, "to: True is not an integer from 0 up"),
        (
            told("waiting", generation=10**30),
            "status",
            2,
            "generation: a number of more than 64 bits is not",
        ),
        (told("run_finished", steps="8"), "logs", 2, "steps: '8' is not an integer from 0 up"),
        (text("events.ndjson", LONG + b"\n"), "logs", 2, "events.ndjson, line 1: the file is damaged: ValueError"),
        # The exit code was taken from the file without a check.
        (put("result.json", exit_code=-1), "attach", 2, "exit_code: -1 is not an integer from 0 to 255"),
    ],
)
def test_a_run_folder(
    damage: Callable[[Path], None], verb: str, code: int, expected: str, run: Path, tmp_path: Path
) -> None:
    damage(run)
    got, out, err = raytrain(verb, run, *(["--to", tmp_path / "model"] if verb == "export" else []))
    assert (got, expected in out + err) == (code, True), out + err


@pytest.mark.parametrize("length", ["steps: 1000000000", "epochs: 1000000"])
def test_a_job_that_became_longer_is_audited_in_no_time(length: str, run: Path) -> None:
    """The audit allocated 60 GiB for missing entries, or took a minute for a million epochs."""
    job = run / "job.yaml"
    longer = job.read_text().replace("epochs: 2", "epochs: null").replace("steps: null", "steps: null")
    key = length.partition(":")[0]
    job.write_text(longer.replace(f"{key}: null", length))
    code, _, err = raytrain("audit", run)
    assert code == 2
    assert "is due, but the ledger has only 32 entries" in err


def test_a_dataset_whose_rows_are_nan_has_no_length(run: Path) -> None:
    """The notebook view was a traceback, because of a share of NaN."""
    from raytrain_plus.runs.follow import seen
    from raytrain_plus.storage.folders.local import LocalFolder

    put("dataset.json", rows=float("nan"))(run)
    assert "step 8 of 8" in seen(LocalFolder(run)).html()


def test_every_field_of_an_event_has_a_shape() -> None:
    """A field without a shape would be read from a damaged line without a check."""
    assert {name for fields in FIELDS.values() for name in fields} <= _SHAPES.keys()
    assert has.object_of(a=has.whole(0))({"a": True})
