"""Damage run folders, and check every command that reads them.

A complete run is made once, without Ray: two checkpoints, a ledger, events, a result. A copy of it is damaged: bytes,
the structure of a JSON document, or which files exist. Each command must then report an error or correct values.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
import yaml

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import RaytrainError
from raytrain_plus.launch.preflight import order_of
from raytrain_plus.observe.run_events import EVENTS, EventLog
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.result import Result
from raytrain_plus.runs import folder, follow
from raytrain_plus.runs.export import NEWEST, weights_of
from raytrain_plus.runs.folder import DATASET, JOB, LEASE, Fence, Lease, claim, held_at, job_of
from raytrain_plus.state.stored.checkpoint import commit
from raytrain_plus.state.stored.manifest import FOLDER, name_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.states import described, shares
from tests.unit.fuzz import jobs
from tests.unit.fuzz.tasks import Small, prepare
from tests.unit.fuzz.verdict import Fault, limited, raytrain

SAVED = (3, 7)
"""Steps with a checkpoint; the second is the last."""


@dataclass(frozen=True, slots=True)
class Base:
    """The run that copies are made of."""

    folder: Path
    job: Job
    weights: Mapping[int, Mapping[str, torch.Tensor]]
    """Weights of each checkpoint, by step."""
    audited: Mapping[str, Any]
    """Result of its audit."""


@contextmanager
def expired_at_once() -> Iterator[None]:
    """Let leases expire at once: to wait for one would take 10 s."""
    before = folder.LEASE_S, follow.LEASE_S, follow.HERE_S
    folder.LEASE_S = follow.LEASE_S = 0.0
    follow.HERE_S = 0.001
    try:
        yield
    finally:
        folder.LEASE_S, follow.LEASE_S, follow.HERE_S = before


def base_in(folder: Path) -> Base:
    """Make data and a finished run in this folder, which is the working directory."""
    for name in ("data", "held_out"):
        (folder / name).mkdir()
        for number in range(2):
            prepare(folder / name, str(number))
    job = Job(
        name="run",
        task=jobs.TASK,
        data=Data(path="data", batch_size=32, shards=4),
        epochs=2,
        evaluate=Evaluate(path="held_out", every_steps=4),
        storage=str(folder / "runs"),
    )
    run = LocalFolder(folder / "runs" / "run")
    Fence(run, 0)
    seen = parquet_source(job.data.path)
    run.write(JOB, [job.to_yaml().encode()])
    run.write(DATASET, [json.dumps(seen.describe()).encode()])
    run.write("trackers/mlflow.json", [b'{"run": "abc"}\n'])
    run.write("pipeline.json", [b"{}"])
    run.write("tensorboard/events.out.tfevents.1", [b"x" * 40])
    Lease(run, "10.0.0.1:6379", "run/1").renew()
    run.write(LEASE, [json.dumps({**json.loads(run.read(LEASE)), "time": 1e9, "machine": "another"}).encode()])
    _write_ledger(run, job)
    weights = {step: _checkpoint(run, job, step, seen.fingerprint) for step in SAVED}
    _write_events(run, job)
    result = Result(name="run", status="finished", exit_code=0, path=run.path, steps=8, samples=256)
    result.save(run)
    safetensors.torch.save_file(dict(weights[SAVED[-1]]), run.path / "model.safetensors")
    code, out, err = raytrain("audit", run.path, "--json")
    assert code == 0, out + err
    return Base(run.path, job, weights, json.loads(out))


def _write_ledger(run: LocalFolder, job: Job) -> None:
    seen = parquet_source(job.data.path)
    rows = RowReader(source=seen, sample_order=sample_order_of(job, seen), seed=job.seed, transform=None, block_rows=8)
    parts = LedgerFiles(run)
    feed = Batches(
        rows, shards=range(4), first_step=0, microbatches=1, collate=len, cache=UnitCache(rows, 0), make_stream=None
    )
    with feed:
        for step in range(rows.sample_order.steps):
            notes = torch.zeros(4).numpy().astype(NOTE)
            for shard, batches in feed.get(step, 10).shards.items():
                count, ids = sum(batch.rows for batch in batches), sum(batch.ids for batch in batches) % 2**64
                notes[shard] = (batches[0].start, count, ids, count, 0.0, 0)
            parts.add(0, step, notes.tobytes())
    parts.close()


def _checkpoint(run: LocalFolder, job: Job, step: int, fingerprint: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    model = torch.nn.Sequential(*(build() for build in Small().layers().values()))
    weights = {
        f"{['first', 'last'][int(name[0])]}{name[1:]}": value.detach() for name, value in model.named_parameters()
    }
    tensors = {f"param/{name}": value for name, value in weights.items()}
    tensors |= {f"optim/{name}/exp_avg": torch.ones_like(value) for name, value in weights.items()}
    written = shares(run, tensors, name_of(step, 0), 2)
    manifest = described(step, 0, written, tree={"persistent": []}, job=yaml.safe_load(job.to_yaml()))
    commit(run, replace(manifest, data={"fingerprint": fingerprint, "rows": 128, "samples": 32 * (step + 1)}))
    return weights


def _write_events(run: LocalFolder, job: Job) -> None:
    log = EventLog(run)

    def tell(kind: str, time: float, **fields: Any) -> None:
        log.write(kind, generation=0, time=1.7e9 + time, fields=fields)

    who = {"worker": "w0", "pid": 1, "node": "n"}
    member = {**who, "replica": 0, "stage": 0, "params": 7, "shards": [0, 1, 2, 3]}
    tell("run_started", 0, job=job.to_yaml(), versions={"ray": "2"}, address="10.0.0.1:6379")
    tell("waiting", 0.5, **{"for": "workers"})
    tell("view_formed", 1, members=[member], spares=[], collective="none (one worker)", moved_bytes=0)
    tell("evaluated", 1.5, step=-1, metrics={"loss": 2.0})
    for step in range(8):
        tell("step_committed", 2 + step, step=step, epoch=step // 4, samples=32, loss=1.0, grad_norm=0.5, seconds=0.5)
        if step in SAVED:
            tell("checkpoint_saved", 2.1 + step, step=step, seconds=0.1, stall_s=0.01)
            tell("evaluated", 2.2 + step, step=step, metrics={"loss": 1.0 / step})
    tell("worker_lost", 11, **who, cause="killed")
    phases = dict.fromkeys(("detect", "interrupt", "form", "transfer", "resume"), 0.1)
    tell(
        "recovered",
        11.5,
        cause="killed",
        stall_s=0.5,
        steps_lost=0,
        steps_recomputed=0,
        kept=[who],
        replaced=[],
        phases=phases,
    )
    tell("worker_joined", 11.6, **who)
    tell("rescaled", 11.7, **{"from": 1, "to": 2})
    tell("drain_notice", 11.8, node="n", deadline=None)
    tell("checkpoint_failed", 11.9, step=5, error="full")
    tell("resumed", 11.95, step=7, checkpoint=name_of(7, 0), voided_to=7)
    tell("run_finished", 12, status="finished", error=None, steps=8, samples=256, state_sha256="ab")
    log.close()


# Damage.

WRONG: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3.5, -1e308, 10**30, 2**63, -(2**63) - 1, [0] * 50, [], {}, [[]])
WRONG += ("", "x", "7", "../x", "\0", "\ud800", "é" * 50, "x" * 2000, "nan", "1e5", float("nan"), float("inf"))
WRONG += ([1], ["x"], {"x": 1}, {"": None}, [None])
SMALL = (
    b"",
    b"\0",
    b"\0" * 600,
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"null",
    b"[]",
    b"{",
    b"}",
    b'"',
    b"\n\n",
    b"{}\n",
    b"7",
)
GARBAGE = (*SMALL, b"PAR1", b"NaN", b"---\n", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 100_000, b"x" * 2_000_000)
GARBAGE += (b"1" * 5000, b'{"a": ' + b"1" * 5000 + b"}")
NAMES = """checkpoints/000000000003-00000000/y
checkpoints/x.json
checkpoints/000000000009-00000000.json
checkpoints/000000000009-00000000/x
checkpoints/00000000000٣-0000000٣.json
checkpoints/999999999999-99999999.json
checkpoints/²
checkpoints/.x.part
ledger/x.parquet
ledger/²-x.parquet
ledger/-.parquet
claims/99999999999999999999999.json
claims/x.json
claims/00000009.json
claims/²
claims/٣.json
events-00000001.ndjson
.lease.json.x.part
job.yaml/x
result.json/x""".splitlines()
SELDOM = ("pipeline.json", "mlflow.json")
"""Documents on which little depends."""


@dataclass(slots=True)
class Damage:
    """How a folder was damaged."""

    forged: bool = False
    """Whether a document was changed and its hash updated."""
    touched: set[str] | None = None
    """The files whose bytes changed, or None after anything else."""


def damaged(base: Base, folder: Path, seed: int) -> Damage:
    """Copy the base's folder and damage the copy as the seed determines."""
    draw = random.Random(seed)
    shutil.copytree(base.folder, folder)
    done = Damage(touched=set())
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if not files:
            break
        # Prefer documents: damage to hashed files is easily noticed.
        documents = [path for path in files if path.suffix in (".json", ".ndjson", ".yaml")]
        told = [path for path in documents if path.name not in SELDOM]
        file = draw.choice(told if told and draw.random() < 0.75 else files)
        act = draw.choice([_bytes, _garbage, _structure, _structure, _structure, _lines, _place, _place])
        act(folder, file, draw, done)
        if done.touched is not None:
            done.touched.add(file.relative_to(folder).as_posix())
    return done


def _bytes(folder: Path, file: Path, draw: random.Random, done: Damage) -> None:
    data = bytearray(file.read_bytes())
    kind = draw.randrange(4)
    if kind == 0:
        del data[draw.randrange(len(data) + 1) :]
    elif kind == 1:
        at = draw.randrange(len(data) + 1)
        data[at:at] = draw.randbytes(draw.choice([1, 3, 40]))
    elif kind == 2:
        at = draw.randrange(len(data) + 1)
        data[at : at + draw.choice([1, 10, 300])] = b""
    for _ in range(draw.choice([1, 1, 8]) if kind == 3 and data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _garbage(folder: Path, file: Path, draw: random.Random, done: Damage) -> None:
    file.write_bytes(draw.choice(GARBAGE) + (file.read_bytes() if draw.random() < 0.1 else b""))


def _structure(folder: Path, file: Path, draw: random.Random, done: Damage) -> None:
    """Change the structure of a JSON document or of one line of JSON; a manifest's hash is updated."""
    if file.name == JOB:
        file.write_bytes(jobs.made(draw.randrange(10**6)).text)
        return
    try:
        lines = file.read_bytes().split(b"\n") if file.name == EVENTS else [file.read_bytes()]
        number = draw.randrange(len(lines))
        value = json.loads(lines[number])
    except (ValueError, RecursionError):
        return
    for _ in range(draw.choice([1, 1, 2])):
        value = _changed(value, draw)
    text = json.dumps(value).encode()
    if isinstance(value, dict) and file.parent.name == FOLDER:
        text, done.forged = hashed(value), True
    lines[number] = text
    file.write_bytes(b"\n".join(lines))


def hashed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest as bytes, with the correct hash."""
    rest = json.dumps({name: value for name, value in manifest.items() if name != "xxh3_128"})[1:].encode()
    return f'{{"xxh3_128": "{xxhash.xxh3_128(rest).hexdigest()}", '.encode() + rest


def _changed(value: Any, draw: random.Random) -> Any:
    """Return `value` with one item inside it changed, removed or duplicated."""
    if not value or not isinstance(value, (dict, list)) or draw.random() < 0.05:
        return draw.choice(WRONG)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    kind = draw.random()
    if kind < 0.15:
        del changed[key]
    elif kind < 0.2 and isinstance(changed, dict):
        changed[draw.choice(["x", "", "kind", "time", "\ud800"])] = draw.choice(WRONG)
    elif kind < 0.2:
        changed.insert(key, draw.choice([changed[key], *WRONG]))
    else:
        changed[key] = _changed(value[key], draw)
    return changed


def _lines(folder: Path, file: Path, draw: random.Random, done: Damage) -> None:
    lines = file.read_bytes().split(b"\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[other])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        lines[at] = draw.choice(SMALL)
    else:
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
    file.write_bytes(b"\n".join(lines))


def _place(folder: Path, file: Path, draw: random.Random, done: Damage) -> None:
    """Replace a file or folder by something else, or add something where nothing was."""
    done.touched = None
    target = draw.choice([file, file, file.parent])
    if target == folder:
        target = file
    kind = draw.randrange(8)
    if kind == 6:
        with contextlib.suppress(OSError):
            new = folder / draw.choice([*NAMES, "\udcff"])
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(draw.choice([b"", b"{}", file.read_bytes()]))
        return
    if kind == 7:
        target.chmod(draw.choice([0, 0o200, 0o100]))
        return
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    if kind == 1:
        target.mkdir()
        (target / "x").write_bytes(b"x")
    elif kind == 2:
        target.write_bytes(b"x")
    elif kind == 3:
        target.symlink_to(target.name)
    elif kind == 4:
        target.symlink_to(draw.choice(["nowhere", "/nowhere", "..", "/etc/passwd", "."]))
    elif kind == 5:
        target.mkdir()


# The check.


def check(seed: int, base: Base) -> str:
    """Try one damaged folder next to the base's; return the exit codes of the commands."""
    folder = base.folder.parent / f"damaged-{seed}"
    try:
        with expired_at_once():
            return check_folder(folder, base, damaged(base, folder, seed))
    finally:
        for path in [folder, *(Path(top) / name for top, names, _ in os.walk(folder) for name in names)]:
            with contextlib.suppress(OSError):
                path.chmod(0o700)
        shutil.rmtree(folder)


def check_folder(folder: Path, base: Base, done: Damage) -> str:
    """Try a given folder. Raises `Fault`, or the exception that should not have escaped."""
    codes = []
    to = folder.with_name(f"{folder.name}.safetensors")
    for words in (
        ["status"],
        ["status", "--json"],
        ["logs"],
        ["attach", "--json"],
        ["audit", "--json"],
        ["export", "--to", to],
    ):
        code, out, _ = raytrain(words[0], folder, *words[1:])
        codes.append(code)
        if "--json" in words:
            json.loads(out)
        if words[0] == "audit" and code == 0:
            _check_audit(json.loads(out), base, done)
        if words[0] == "export" and code == 0:
            _check_export(to, out, base, done)
    to.unlink(missing_ok=True)
    for look in (_seen, _resumed, _weights, _tracked, _claimed):
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), limited():
            codes.append(look(LocalFolder(folder), base, done))
    return "".join(map(str, codes))


def _check_audit(found: Mapping[str, Any], base: Base, done: Damage) -> None:
    """Check that a clean audit is right: only damage outside the ledger may change which rows were due."""
    if done.touched is not None and all(name.startswith("ledger/") for name in done.touched):
        same = {key: value for key, value in found.items() if key != "run"}
        if same != {key: value for key, value in base.audited.items() if key != "run"}:
            raise Fault(f"the audit says {found}, but for the undamaged run {base.audited}")


def _check_export(to: Path, said: str, base: Base, done: Damage) -> None:
    """Check that the export equals, to the bit, the checkpoint of the step that is reported."""
    if done.forged:
        return
    step = int(said.partition("after step ")[2].split()[0]) - 1
    got = safetensors.torch.load_file(to)
    if step not in base.weights or not _equal(got, base.weights[step]):
        raise Fault(f"what was exported is not the model after step {step + 1}: {said}")


def _equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


def _told(look: Callable[[], Any]) -> int:
    try:
        look()
    except (RaytrainError, OSError) as error:
        if not str(error).strip():
            raise Fault(f"{type(error).__name__} without a word") from error
        # Failures of the storage may pass; every other error must be one of ours.
        if isinstance(error, OSError) and not isinstance(error, RaytrainError | FileNotFoundError):
            raise
        return 2
    return 0


def _seen(run: LocalFolder, base: Base, done: Damage) -> int:
    return _told(lambda: (follow.seen(run).html(), held_at(run)))


def _resumed(run: LocalFolder, base: Base, done: Damage) -> int:
    """Run the part of `resume` that does not need Ray."""
    own = [f"name={json.dumps(run.path.name)}", f"storage={json.dumps(str(run.path.parent))}"]

    def preflight() -> None:
        job = job_of(run, own)
        order = order_of(job, resumes=True)
        if (
            done.touched is not None
            and JOB not in done.touched
            and replace(job, name="run", storage="x") != replace(base.job, storage="x")
        ):
            raise Fault(f"another job is resumed: {job}")
        if isinstance(order, RunOrder) and order.past is not None and not done.forged:
            steps = {one.step for one in order.past.found if one.manifest is not None}
            if not steps <= set(SAVED):
                raise Fault(f"resumed from checkpoints of steps {steps}")

    return _told(preflight)


def _weights(run: LocalFolder, base: Base, done: Damage) -> int:
    return _told(lambda: weights_of(run, NEWEST))


def _tracked(run: LocalFolder, base: Base, done: Damage) -> int:
    return _told(Bookmark(run, "mlflow", 0).load)


def _claimed(run: LocalFolder, base: Base, done: Damage) -> int:
    """Claim the folder, as a controller does first; this changes the folder."""
    return _told(lambda: claim(run, fresh=False, claims=folder.claims_of(run)))
