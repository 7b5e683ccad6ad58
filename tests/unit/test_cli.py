"""The command line: its exit codes, and who is told what, and where."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from raytrain_plus import cli
from raytrain_plus.errors import InputError, RunError, TrainingError
from raytrain_plus.result import Result
from raytrain_plus.taskfile import load_task


def ended(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `raytrain` where its verb does `call`."""
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
def test_a_users_mistake_is_words_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    assert ended(raising(error), monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_our_own_fault_keeps_its_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(ZeroDivisionError("ours")), monkeypatch) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "Please report it" in err
    assert "torch " in err


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (143, 143), (None, 0)])
def test_a_verbs_own_code_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, code: int | None, expected: int) -> None:
    assert ended(lambda: code, monkeypatch) == expected


def test_a_signal_while_a_task_is_imported_is_no_mistake_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n"
    (tmp_path / "signalled_task.py").write_text(text)
    assert ended(lambda: load_task("signalled_task:Mine", [tmp_path]), monkeypatch) == 143


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["fly"])
    assert left.value.code == 2
    assert "No such command 'fly'" in capsys.readouterr().err


def test_a_job_that_is_wrong_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"task": "a:B", "data": {"path": "d", "batch_size": 7, "shards": 2}, "step": 3}))
    with pytest.raises(SystemExit) as left:
        cli.main(["validate", str(file), "--json"])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean 'steps'?" in err
    assert "7 is no multiple of data.shards = 2" in err


def test_what_json_has_no_word_for_is_text_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = pytest.importorskip("raytrain_plus.runner")
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


def test_the_wheel_of_horovod_is_left_where_it_is_wanted(
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
