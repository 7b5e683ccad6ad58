"""The checks of `validate` on a job that is not run."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from raytrain_plus import Data, Evaluate, Job, Parallel, Task, WeightFiles, Workers
from raytrain_plus.checks import validate
from raytrain_plus.checks.data_report import data_report
from raytrain_plus.checks.trial_process import TryingHere, trying_apart
from raytrain_plus.checks.validate import Report, validate_job
from raytrain_plus.errors import DataError, InputError, TaskError
from raytrain_plus.job.task_loader import prints_hidden
from raytrain_plus.launch.preflight import order_of
from raytrain_plus.storage.interface import Folder
from raytrain_plus.trial import memory_limits


def write(folder: Path, name: str) -> None:
    folder.mkdir()
    pq.write_table(pa.table({name: list(range(20))}), folder / "0.parquet")


def job(tmp_path: Path, prepare: str | None = None, data: str = "data", held_out: str = "held_out") -> Job:
    return Job(
        name="x",
        task="examples.digits:Digits",
        data=Data(path=str(tmp_path / data), prepare=prepare, batch_size=8),
        steps=3,
        evaluate=Evaluate(path=str(tmp_path / held_out), every_steps=1),
    )


@pytest.mark.parametrize(
    ("changes", "kept"), [({}, True), ({"cache_mb": 0}, False), ({"transform": "examples.digits:prepare"}, False)]
)
def test_only_reads_that_are_repeated_are_warned_of(tmp_path: Path, changes: dict[str, Any], kept: bool) -> None:
    write(tmp_path / "data", "x")
    write(tmp_path / "held_out", "x")
    plain = job(tmp_path)
    said = validate_job(replace(plain, data=replace(plain.data, shards=8, **changes)), []).lines()
    assert ("  workers keep the row groups in memory once they are read (data.cache_mb)" in said) == kept
    assert any("most reads are wasted; use fewer data.shards, or" in line for line in said) != kept


def test_a_storage_that_does_not_answer_delays_validation_by_at_most_10_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of S3 retries for minutes, even when its process should end."""
    write(tmp_path / "data", "x")
    write(tmp_path / "held_out", "x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{silent.getsockname()[1]}"
        assert validate.STORAGE_S <= 8
        monkeypatch.setattr(validate, "STORAGE_S", 0.5)
        wished = replace(job(tmp_path), storage=f"s3://bucket/runs?{settings}")
        began = time.monotonic()
        report = validate_job(wished, [])
        assert time.monotonic() - began < 10
    assert report.storage == "storage: s3://bucket/runs does not answer this machine within 0.5 s"
    assert f"  warning: {report.storage}" in report.lines()


def test_an_early_answer_of_the_storage_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", "x")
    write(tmp_path / "held_out", "x")
    asked = validate._Asked((tmp_path / "runs").as_uri())
    asked.process.wait(20)
    monkeypatch.setattr(asked, "_until", 0.0)
    assert asked.answer() == ""


@pytest.mark.slow
def test_the_answer_or_refusal_of_a_storage_is_reported(tmp_path: Path, bucket: Folder) -> None:
    write(tmp_path / "data", "x")
    write(tmp_path / "held_out", "x")
    assert validate_job(replace(job(tmp_path), storage=bucket.inside("runs").address), []).storage == ""
    nobody = "s3://bucket/runs?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:1"
    refused = validate_job(replace(job(tmp_path), storage=nobody), []).storage
    assert refused.startswith("storage: s3://bucket/runs cannot be read from this machine: ")
    with pytest.raises(InputError, match="storage: s3:///: this is not a valid address of a folder"):
        validate_job(replace(job(tmp_path), storage="s3:///"), [])


def test_held_out_data_that_is_missing_or_another_table(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    with pytest.raises(DataError, match=r"held_out: there is no such file or folder"):
        validate_job(job(tmp_path), [])
    write(tmp_path / "held_out", "y")
    with pytest.raises(DataError, match=r"other columns than the training data: x, y"):
        validate_job(job(tmp_path), [])


def test_patterns_are_checked_and_refused_with_a_preparation(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    write(tmp_path / "held_out", "x")
    report = validate_job(job(tmp_path, data="d*/*.parquet", held_out="held_out/[0-9].parquet"), [])
    assert (report.rows, report.files_in_all) == (20, 2)
    with pytest.raises(DataError, match="no file matches this pattern"):
        validate_job(job(tmp_path, data="data/*.csv"), [])
    with pytest.raises(DataError, match="cannot write to a path with wildcards"):
        validate_job(job(tmp_path, prepare="examples.digits:prepare", held_out="held_out/*.parquet"), [])


def test_files_without_page_checksums_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("data", "held_out"):
        write(tmp_path / folder, "x")
        for number in range(1, 3):
            table = pq.read_table(tmp_path / folder / "0.parquet")
            pq.write_table(table, tmp_path / folder / f"{number}.parquet", write_page_checksum=number == 2)
    report = validate_job(job(tmp_path), [])
    names = [str(tmp_path / folder / f"{number}.parquet") for folder in ("data", "held_out") for number in (0, 1)]
    assert list(report.without_checksums) == names
    said = "so damaged values in them cannot be detected; write them with pq.write_table(..., write_page_checksum=True)"
    listed = ", ".join([*names[:3], "..."])
    assert f"  4 of 6 files have no page checksums ({listed}), {said}" in report.lines()
    # Files that are held out and trained on are counted once.
    assert validate_job(job(tmp_path, data="*/[0-9].parquet"), []).files_in_all == 6
    monkeypatch.setattr(validate, "LOOKED_AT", 2)
    assert any(line.startswith("  2 of the first 2 files have no") for line in validate_job(job(tmp_path), []).lines())
    for name in names:
        pq.write_table(pq.read_table(name), name, write_page_checksum=True)
    assert not any("checksum" in line for line in validate_job(job(tmp_path), []).lines())


def test_unreadable_data_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    for paths in ({"data": "y" * 300}, {"held_out": "y" * 300}):
        with pytest.raises(DataError, match="y: cannot be accessed: File name too long"):
            validate_job(job(tmp_path, "examples.digits:prepare", **paths), [])


def test_steps_of_unusual_sizes_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    plain = replace(job(tmp_path), evaluate=None)
    large = replace(plain, data=replace(plain.data, batch_size=80))
    [found] = validate_job(large, []).odd_sizes
    assert found == "data.batch_size = 80 is more than the 20 rows of the data: a step uses rows repeatedly"
    assert f"  warning: {found}" in validate_job(large, []).lines()
    whole = replace(plain, steps=None, epochs=1, data=replace(plain.data, batch_size=16))
    [found] = validate_job(whole, []).odd_sizes
    assert found.startswith("the last step has 20 rows, more than data.batch_size = 16: the rows left over are too few")
    assert validate_job(plain, []).odd_sizes == ()


def test_the_sources_of_a_mix_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "held_out", "x")
    for name in ("a", "b"):
        write(tmp_path / name, "x")
    mix = [{"path": str(tmp_path / "a"), "weight": 3}, {"path": str(tmp_path / "b"), "weight": 1}]
    wished = replace(job(tmp_path), data=Data(mix=mix, batch_size=32), steps=4)
    report = validate_job(wished, [])
    assert [source.epochs for source in report.mix] == [4.8, 1.6]
    lines = report.lines()
    assert lines[3] == f"  source 0, {tmp_path / 'a'}: 20 rows, weight 3, 75 % of each step, 4.80 epochs"
    assert lines[4] == f"  source 1, {tmp_path / 'b'}: 20 rows, weight 1, 25 % of each step, 1.60 epochs"
    assert report.to_json()["mix"][1]["epochs"] == 1.6
    reported = data_report(wished, [])
    assert reported.lines()[1:3] == lines[3:5]
    os.rename(tmp_path / "b", tmp_path / "c")
    with pytest.raises(DataError, match="/b"):
        validate_job(wished, [])
    # Nothing to compare until it is made.
    later = replace(wished, data=replace(wished.data, prepare="os:mkdir"))
    assert validate_job(later, []).rows is None


def test_arguments_that_the_task_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"^args.widht: \w+\(...\) takes no argument 'widht'\n  expected: "):
        validate_job(replace(job(tmp_path), args={"widht": 3}), [])


def test_a_class_that_is_not_a_task(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is the class int"):
        validate_job(replace(job(tmp_path), task=int), [])


def test_more_workers_than_shards_are_reported_as_unused(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    whole = replace(job(tmp_path), evaluate=None, workers=Workers(min=2, max=10**12))
    report = validate_job(whole, [])
    assert [size.workers for size in report.sizes] == [2, 3, 4, 5, 6, 7, 8]
    assert report.lines()[-1].startswith("  warning: at most 8 of workers.max = 1000000000000 are used: with data.sha")
    # Seven workers would be no faster than four.
    report = validate_job(replace(whole, workers=Workers(min=2, max=7)), [])
    assert "at most 4 of workers.max = 7 are used" in report.lines()[-1]
    assert not validate_job(replace(whole, workers=Workers(min=2, max=4)), []).left_out


class Layered(Task):
    """A task of two layers, with an optional fault in them."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        if self.wrong == "layers":
            raise ZeroDivisionError("in layers")
        name = "in/out" if self.wrong == "slash" else "in"
        return {name: lambda: nn.Linear(1, 4), "out": lambda: nn.Linear(5 if self.wrong == "width" else 4, 1)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"][:, None].float()).square().mean()

    def collate(self, table: pa.Table) -> dict[str, torch.Tensor]:
        if self.wrong == "collate":
            raise KeyError("label")
        batch: dict[str, torch.Tensor] = super().collate(table)
        return batch


class Sliced(Layered):
    def tensor(self) -> dict[str, str]:
        return {"out": "colwise", "in": "colwise"} if self.wrong == "odd" else {"in": "colwise"}


class Plateau(Layered):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def test_a_scheduler_that_needs_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"^scheduler\(\) of the task Plateau: ReduceLROnPlateau.step\(\) needs 'metrics'"
    ):
        validate_job(replace(staged(tmp_path), task=Plateau), [])


def tried(wished: Job) -> Report:
    return validate_job(wished, [], TryingHere(wished, []))


def staged(tmp_path: Path, wrong: str = "", **parallel: Any) -> Job:
    write(tmp_path / "data", "x")
    plain = replace(job(tmp_path), task=Layered, args={"wrong": wrong}, evaluate=None, workers=Workers(min=2, max=4))
    return replace(
        plain,
        data=replace(plain.data, batch_size=16, shards=4),
        parallel=Parallel(**{"pipeline": 2, "microbatches": 2, **parallel}),
    )


def test_the_partition_is_shown(tmp_path: Path) -> None:
    report = tried(staged(tmp_path))
    assert report.cut is not None
    assert [stage.layers for stage in report.cut.stages] == [(("in",),), (("out",),)]
    lines = report.lines()
    assert "  4 workers: 2 replicas of 2 stages, 2 shards each" in lines
    assert lines[-4].startswith("    stage 0: in; 8 parameters, 0.0 MB, ")
    assert lines[-2].startswith("    expected bubble: ")
    assert re.fullmatch(r"    with a single replica, copies in memory: up to [\d.]+ MB more on each worker", lines[-1])


def test_slices_are_shown_and_compared(tmp_path: Path) -> None:
    cut = replace(staged(tmp_path, tensor=2), task=Sliced, workers=Workers(min=1, max=8))
    lines = tried(cut).lines()
    assert "  8 workers: 2 replicas of 2 stages of 2 workers, 2 shards each" in lines
    assert "  2 workers: 1 replica of 2 stages of 1 worker, 4 shards each" in lines
    assert "  2 slices; of the 13 parameters of all stages: 9 on each of 2 workers" in lines
    alone = replace(cut, parallel=Parallel(tensor=2))
    assert [line for line in tried(alone).lines() if "worker: " in line or "partition" in line] == [
        "  1 worker: 1 replica of 1 worker, 4 shards each"
    ]
    with pytest.raises(TaskError, match="'out' has 1 outputs, which 2 slices do not divide"):
        tried(replace(alone, args={"wrong": "odd"}))


def test_how_the_partition_was_found_is_shown(tmp_path: Path) -> None:
    by = "  partitioned into 2 stages, by "
    timed = tried(staged(tmp_path)).lines()
    assert any(line.startswith(f"{by}the time of each layer on this machine; 1f1b") for line in timed)
    (tmp_path / "other").mkdir()
    counted = tried(staged(tmp_path / "other", schedule="pipedream")).lines()
    assert any(line.startswith(f"{by}the counted operations of each layer; pipedream") for line in counted)


def test_a_given_partition_is_shown_and_checked(tmp_path: Path) -> None:
    report = tried(staged(tmp_path, partition=["in", "out"]))
    assert any(line.startswith("  partitioned into 2 stages, as parallel.partition says; ") for line in report.lines())
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="the model has no layer 'outt'; the nearest name is 'out'"):
        tried(staged(tmp_path / "other", partition=["in", "outt"]))


def test_a_partition_that_needs_a_trial_is_announced(tmp_path: Path) -> None:
    last = "  the partition into stages is not known without a trial: layers are run on rows of the data"
    report = validate_job(staged(tmp_path), [])
    assert report.lines()[-1] == last
    assert report.lines()[1] == "  the task was not run"


def test_partitions_too_large_for_this_machine_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "total_memory", lambda: 100)
    report = tried(staged(tmp_path))
    [line] = [line for line in report.lines() if "does not fit" in line]
    assert re.search(r"stage \d of 2 needs \d+ bytes \(the layer '(in|out)': \d+ bytes\), but a worker has 100", line)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("layers", "the layers of Layered cannot be built: ZeroDivisionError: in layers"),
        ("slash", "the layer 'in/out' has a '/' in its name"),
        ("width", "Layered.loss raised RuntimeError: mat1 and mat2 shapes"),
        ("collate", "Layered.collate raised KeyError: 'label'"),
    ],
)
def test_a_model_that_cannot_be_partitioned_is_a_task_error(tmp_path: Path, wrong: str, what: str) -> None:
    with pytest.raises(TaskError, match=re.escape(what)):
        tried(staged(tmp_path, wrong))


def test_more_stages_than_layers_and_fewer_microbatches_than_the_schedule_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 stages of interleaved need 4 layers, but the model has 2: in, out"):
        tried(staged(tmp_path, schedule="interleaved"))
    (tmp_path / "other").mkdir()
    few = replace(staged(tmp_path / "other", microbatches=1), workers=Workers(min=2, max=8))
    with pytest.raises(InputError, match="1f1b needs at least as many microbatches per replica as stages: 2, not 1"):
        tried(few)


def test_a_trial_makes_missing_data_and_says_what_it_tried(tmp_path: Path) -> None:
    wished = replace(
        job(tmp_path, "examples.digits:prepare"), evaluate=Evaluate(path=str(tmp_path / "held_out"), every_steps=9)
    )
    report = validate_job(wished, [])
    assert (report.rows, report.trial) == (None, None)
    with pytest.raises(TaskError, match=r"fix: use fewer data\.shards or a larger data\.batch_size") as caught:
        tried(wished)
    assert "Digits.loss raised ValueError: Expected more than 1 value per channel" in str(caught.value)
    report = tried(replace(wished, data=replace(wished.data, batch_size=16)))
    assert report.rows == 1437
    assert report.trial is not None
    assert report.lines()[1].startswith("  tried: a step with 2 rows took ")
    assert set(report.trial.metrics) == {"loss", "accuracy"}


class Pooled(Layered):
    def collate(self, table: pa.Table) -> dict[str, torch.Tensor]:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(abs, (-1,)) == 1
        return super().collate(table)


@pytest.mark.slow
def test_a_task_may_start_processes_in_a_trial_of_its_own(tmp_path: Path) -> None:
    sound = replace(staged(tmp_path), parallel=Parallel())
    with trying_apart(replace(sound, task=Pooled), []) as trying:
        assert trying.result().rows == 4


def slowly(folder: Path, name: str) -> None:
    (folder / "half").write_text("x")
    time.sleep(60)


@pytest.mark.slow
def test_an_ended_trial_leaves_no_half_of_the_data(tmp_path: Path) -> None:
    wished = replace(job(tmp_path, f"{__name__}:slowly"), task=Layered)
    with trying_apart(wished, []):
        until = time.monotonic() + 60
        while not list(tmp_path.glob(".data.*/half")):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert not list(tmp_path.glob(".data.*/*"))


class Ended(Layered):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        os._exit(7)


def test_a_trial_in_a_process_of_its_own_reports_what_the_task_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sound = replace(staged(tmp_path), parallel=Parallel())
    with trying_apart(sound, []) as trying:
        assert trying.result().rows == 4
    with (
        pytest.raises(TaskError, match="the process that tried the task ended with exit code 7"),
        trying_apart(replace(sound, task=Ended), []) as trying,
    ):
        trying.result()
    assert capfd.readouterr().out == ""


class Talking(Task):
    def __init__(self, wrong: bool = False) -> None:
        print("built")
        if wrong:
            raise ValueError("wrong")

    def model(self) -> nn.Module:
        print("model")
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"].float()[:, None]).mean()
        return loss


@pytest.mark.parametrize("sharded", ["none", "optimizer"])
def test_what_a_task_prints_when_it_is_built_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sharded: Any
) -> None:
    write(tmp_path / "data", "x")
    parallel, workers = Parallel(sharded=sharded), Workers(max=2)
    wished = replace(job(tmp_path), task=Talking, evaluate=None, parallel=parallel, workers=workers)
    assert tried(wished).trial is not None
    assert capsys.readouterr().out.splitlines() == ["built", "model"]
    validate_job(wished, [])
    assert capsys.readouterr().out.splitlines() == ["built"]
    with pytest.raises(TaskError, match="wrong"):
        tried(replace(wished, args={"wrong": True}))
    assert capsys.readouterr() == ("", "built\n")


def test_what_is_logged_to_a_hidden_stream_is_shown_later(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("a task of a test")
    log.propagate = False
    with prints_hidden():
        log.addHandler(logging.StreamHandler(sys.stdout))
        log.error("hidden")
    log.error("shown")
    assert capsys.readouterr() == ("shown\n", "")


class Coarse(Task):
    def model(self) -> nn.Module:
        made = nn.Linear(2, 1)
        made.weight = nn.Parameter(torch.zeros(1, 2, dtype=torch.float8_e4m3fn))
        return made

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError


def test_a_parameter_whose_gradients_cannot_be_summed_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    wished = replace(job(tmp_path), task=Coarse, evaluate=None)
    with pytest.raises(TaskError, match="the parameter 'weight' is float8_e4m3fn"):
        validate_job(wished, [])


def test_many_shards_on_few_gpus_are_reported(tmp_path: Path) -> None:
    for folder in ("data", "held_out"):
        write(tmp_path / folder, "x")
    one = replace(job(tmp_path), collective="torch")
    few, many = (validate_job(replace(one, workers=Workers(min=1, max=most, gpus=1)), []).lines() for most in (2, 4))
    told = "  warning: data.shards is 8, and the largest group has 2 model replicas: in each step a GPU makes 4 small"
    assert [line for line in few if line.startswith(told)]
    assert not [line for line in many if "small passes" in line]


class Begun(Task):
    """Its values come from a file that is not there."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def weights(self) -> WeightFiles:
        return WeightFiles("none.safetensors")


@pytest.mark.parametrize("check", [lambda job: validate_job(job, []), order_of])
def test_missing_files_of_weights_are_named_before_any_worker_starts(
    tmp_path: Path, check: Callable[[Job], object]
) -> None:
    write(tmp_path / "data", "x")
    wished = replace(job(tmp_path), task=Begun, evaluate=None, storage=str(tmp_path / "runs"))
    with pytest.raises(TaskError, match=r"Task\.weights: there is no file or folder none\.safetensors"):
        check(wished)
