"""The command line: its exit codes, and what it prints on stdout and stderr."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import click
import click.testing
import pytest

from raytrain_plus.cli import main as cli
from raytrain_plus.cli.submitted import watch_job
from raytrain_plus.errors import InputError, RunError, TrainingError
from raytrain_plus.job.task_loader import load_task
from raytrain_plus.launch import control
from raytrain_plus.launch.handle import Handle
from raytrain_plus.result import Result
from raytrain_plus.runs import folder, follow
from raytrain_plus.storage.folders.local import LocalFolder

REPOSITORY = Path(__file__).parents[2]


def ended(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of `raytrain` if its command does `call`."""
    monkeypatch.setattr(cli.cli, "main", lambda args, standalone_mode: call())
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "job.yaml"])
    assert isinstance(left.value.code, int)
    return left.value.code


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            InputError("3 is odd", where="workers", expected="an even number"),
            2,
            "workers: 3 is odd\n  expected: an even",
        ),
        (RunError("it broke"), 1, "it broke\n"),
        (TrainingError("the task raised KeyError", "  File x"), 1, "  File x\nthe task raised KeyError\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.UsageError("no such option"), 2, "no such option"),
    ],
)
def test_a_user_error_gives_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    assert ended(raising(error), monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(ZeroDivisionError("ours")), monkeypatch) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "Please report it" in err
    assert "torch " in err


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (143, 143), (None, 0)])
def test_a_commands_return_value_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, code: int | None, expected: int
) -> None:
    assert ended(lambda: code, monkeypatch) == expected


def test_a_signal_during_import_is_not_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n"
    (tmp_path / "signalled_task.py").write_text(text)
    assert ended(lambda: load_task("signalled_task:Mine", [tmp_path]), monkeypatch) == 143


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["fly"])
    assert left.value.code == 2
    assert "No such command 'fly'" in capsys.readouterr().err


def test_a_wrong_job_is_reported_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"task": "a:B", "data": {"path": "d", "batch_size": 7, "shards": 2}, "step": 3}))
    with pytest.raises(SystemExit) as left:
        cli.main(["validate", str(file), "--json"])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["status"] == "invalid"
    assert told["error"]["where"].startswith(f"{file}:1:")
    assert "did you mean 'steps'?" in err
    assert "7 is not a multiple of data.shards = 2" in err


def test_values_that_json_lacks_are_text_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = pytest.importorskip("raytrain_plus.launch.runner")
    figures = {"loss": math.nan, "most": math.inf}
    result = Result(name="x", status="failed", exit_code=1, path=tmp_path, steps=1, samples=1, metrics=figures)
    for verb in ("run", "resume"):
        monkeypatch.setattr(runner, verb, lambda *given, **named: result)
    (tmp_path / "job.yaml").write_text(json.dumps({"task": "a:B", "data": {"path": "d", "batch_size": 8}, "steps": 3}))
    for words in (["run", str(tmp_path / "job.yaml")], ["resume", str(tmp_path)]):
        with pytest.raises(SystemExit) as left:
            cli.main([*words, "--json"])
        assert left.value.code == 1
        told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert told["metrics"] == {"loss": "nan", "most": "inf"}


def test_the_wheel_of_horovod_is_copied_to_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "cache" / "horovod.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr("raytrain_plus.install.horovod.install_horovod", lambda say: wheel)
    with pytest.raises(SystemExit) as left:
        cli.main(["install-horovod", "--to", str(tmp_path / "clusters" / "wheels")])
    assert left.value.code == 0
    assert (tmp_path / "clusters" / "wheels" / "horovod.whl").read_bytes() == b"wheel"
    assert f"copied to {tmp_path}/clusters/wheels/horovod.whl" in capsys.readouterr().out


def run_in(storage: Path, **result: Any) -> None:
    """Write a run's folder with its job and, if given, its result."""
    folder = storage / "job"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(
        json.dumps({"task": "a:B", "data": {"path": "d", "batch_size": 8}, "steps": 3, "storage": str(storage)})
    )
    if result:
        values = {"name": "job", "path": folder, "steps": 3, "samples": 24, "exit_code": 0, **result}
        Result(**values).save(LocalFolder(folder))


def test_detach_reports_a_run_that_has_already_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = pytest.importorskip("raytrain_plus.launch.runner")
    for status in ("finished", ""):
        storage = tmp_path / (status or "going")
        run_in(storage, **({"status": status} if status else {}))
        monkeypatch.setattr(runner, "start", lambda *given, at=storage, **named: Handle(LocalFolder(at / "job")))
        with pytest.raises(SystemExit) as left:
            cli.main(["run", str(storage / "job" / "job.yaml"), "--detach"])
        assert left.value.code == 0
        out = capsys.readouterr().out
        assert ("job finished: 3 steps" in out, "job runs detached" in out) == (bool(status), not status)


class Asked:
    """The jobs of a cluster; records that it was asked."""

    def status(self, run: str) -> dict[str, str]:
        return {"state": "running", "job": f"{run}-1", "newest": "step 7"}

    def print_output(self, run: str, stream: TextIO, follow: bool) -> None:
        stream.write("step 7")

    def stop(self, run: str, wait: bool) -> str:
        return f"{run}: stopped"


def test_the_dashboard_in_the_environment_is_asked_for_submitted_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path / "runs", status="finished")
    asked: list[str] = []
    monkeypatch.setattr(cli, "jobs_at", lambda address: asked.append(address) or Asked())
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "http://cluster:8265")

    def said(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([*words, "--storage", str(tmp_path / "runs")])
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    # A run in the storage is read from there.
    code, out, err = said("status", "job")
    assert (code, "job: finished" in out, err, asked) == (0, True, "", [])
    for verb, answer in {"status": "sent: running", "logs": "step 7", "stop": "sent: stopped"}.items():
        code, out, err = said(verb, "sent")
        assert (code, answer in out, "asking http://cluster:8265" in err) == (0, True, True), verb
    assert asked == ["http://cluster:8265"] * 3
    # A cluster address for joining is not a dashboard to ask.
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    code, _, err = said("status", "sent")
    assert (code, "there is no run 'sent'" in err, len(asked)) == (2, True, 3)


def test_a_job_is_checked_against_a_cluster_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)

    def said(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(["validate", "jobs/digits.yaml", "--no-run", "--cluster", "clusters/aws.yaml", *words])
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    code, out, _ = said()
    assert code == 0
    assert "aws.yaml: room for 0 to " in out
    code, out, _ = said("--json")
    told = json.loads(out)
    assert (code, told["name"], told["cluster"]["file"], told["cluster"]["need"]) == (0, "digits", "aws.yaml", "1 CPU")
    code, out, err = said("--set", "workers={min: 1, cpus: 512}")
    assert (code, out) == (2, "")
    assert "the cluster has room for 0 workers of 512 CPU each" in err


def test_the_help_shows_every_command_once_with_a_whole_sentence() -> None:
    assert sorted(name for names in cli._GROUPS.values() for name in names) == sorted(cli.cli.commands)
    text = click.testing.CliRunner().invoke(cli.cli, ["--help"]).output
    lines = [line for line in text.splitlines() if line.startswith("  ") and line.split()[0] in cli.cli.commands]
    assert len(lines) == len(cli.cli.commands)
    for line in lines:
        assert line.endswith(".")
        assert not line.endswith("...")
        assert len(line.split(maxsplit=1)[1]) < 60


class Watched:
    """The jobs of a cluster; whoever watches one gets a signal. Anything else is an error."""

    def __init__(self, number: int) -> None:
        self.number = number

    def watch(self, job: str, stream: TextIO) -> int:
        signal.raise_signal(self.number)
        raise AssertionError("the signal is lost")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_a_watcher_ends_only_the_watching(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    handlers: None,
    number: int,
    code: int,
) -> None:
    jobs: Any = Watched(number)
    assert watch_job(jobs, "job-1", "x", "http://head:8265") == code
    assert "the run continues; stop it with: raytrain stop x --address http://head:8265" in capsys.readouterr().err
    sent: list[object] = []
    monkeypatch.setattr(control, "send", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(follow, "watch", lambda *arguments: jobs.watch("", sys.stdout))
    monkeypatch.setattr(folder, "find_run", lambda *arguments: LocalFolder(tmp_path))
    with pytest.raises(SystemExit) as left:
        cli.main(["attach", "x"])
    assert (left.value.code, sent) == (code, [])
    assert f"the run continues; stop it with: raytrain stop '{tmp_path}'" in capsys.readouterr().err
