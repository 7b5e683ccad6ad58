"""With `--json` a command prints one object on stdout, and nothing else, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.cli import answer
from raytrain_plus.cli import main as cli
from raytrain_plus.cli.answer import error_fields
from raytrain_plus.errors import InputError, JobError, RaytrainError, RunError, TaskError, TrainingError
from raytrain_plus.install.doctor import Check
from raytrain_plus.launch.handle import Handle
from raytrain_plus.observe.views.progress import PlainView, SummaryView
from raytrain_plus.result import Result
from raytrain_plus.storage.folders.local import LocalFolder

RUN, JOB = "run-folder", "job.yaml"
VERBS = {
    "run": (["run", JOB], "raytrain_plus.launch.runner.run"),
    "detach": (["run", JOB, "--detach"], "raytrain_plus.launch.runner.start"),
    "submit": (["submit", JOB], "raytrain_plus.cli.main.submit_run"),
    "resume": (["resume", RUN], "raytrain_plus.launch.runner.resume"),
    "attach": (["attach", RUN], "raytrain_plus.runs.follow.watch"),
    "status": (["status", RUN], "raytrain_plus.runs.status.status"),
    "validate": (["validate", JOB], "raytrain_plus.checks.validate.validate_job"),
    "data": (["data", JOB], "raytrain_plus.checks.data_report.data_report"),
    "verify": (["verify", JOB], "raytrain_plus.launch.verify.verify"),
    "audit": (["audit", RUN], "raytrain_plus.audit.audit.audit"),
    "doctor": (["doctor"], "raytrain_plus.install.doctor.checks"),
}
"""The words of each command that has `--json`, and the function that does its work."""
DEAD = "the controller died: SIGKILL; the checkpoint after step 5 is kept"
SLOW = "Ray failed: GetTimeoutError: no answer\n  this machine now: load average 9.0\n  fix: try again"
REPORT = "report the traceback on standard error"
FAULTS = [
    (InputError("3 is odd", "workers", "2"), 2, "invalid", ("3 is odd; expected: 2", "workers", "")),
    (TaskError("it raised", "task: t:N", "", "check", "  File x"), 2, "invalid", ("it raised", "task: t:N", "check")),
    (RunError(f"{DEAD}; resume with: raytrain resume x"), 1, "failed", (DEAD, "", "resume with: raytrain resume x")),
    (RunError(SLOW), 1, "failed", (SLOW.partition("\n  fix")[0], "", "try again")),
    (ZeroDivisionError("ours"), 1, "failed", ("ZeroDivisionError: ours", "raytrain_plus", REPORT)),
    (SystemExit(7), 1, "failed", ("the process was ended by sys.exit(7)", "", "")),
    (KeyboardInterrupt(), 130, "interrupted", None),
    (SystemExit(143), 143, "interrupted", ("interrupted", "", "")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a job and a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = json.dumps({"task": "a:B", "data": {"path": "d", "batch_size": 8}, "steps": 3})
    for file in (Path(JOB), Path(RUN, JOB)):
        file.parent.mkdir(exist_ok=True)
        file.write_text(job)


def ended(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """Return the exit code of a command with `--json`, the one object on stdout, and stderr."""
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--json"])
    assert isinstance(left.value.code, int)
    out, err = capsys.readouterr()
    return left.value.code, json.loads(out), err


def does(value: Any) -> Callable[..., Any]:
    """Return the work of a command, which prints something, and raises or returns a value."""

    def work(*given: Any, **named: Any) -> Any:
        print("noise")
        if isinstance(value, BaseException):
            raise value
        return value

    return work


@pytest.mark.parametrize(("error", "code", "status", "parts"), FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_an_error_is_one_object_and_text_on_stderr(
    verb: str, error: BaseException, code: int, status: str, parts: tuple[str, str, str] | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words, work = VERBS[verb]
    monkeypatch.setattr(work, does(error))
    got, told, err = ended(words, capsys)
    assert (got, told["status"], list(told)) == (code, status, ["status", "error"])
    if status == "interrupted":
        # An interrupted `attach` says that the run continues.
        assert ("the run continues" in told["error"]["what"]) == (verb == "attach")
    if parts is not None and (status, verb) != ("interrupted", "attach"):
        assert told["error"] == dict(zip(("what", "where", "remedy"), parts, strict=True))
    assert (str(error) if isinstance(error, RaytrainError) else told["error"]["what"]) in err
    assert "noise" in err


@pytest.mark.parametrize("verb", [*VERBS, "stop", "fly"])
def test_words_that_click_refuses_are_invalid_input(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = VERBS[verb][0] if verb in VERBS else [verb, RUN]
    code, told, err = ended([*words, "--no-such-option"], capsys)
    where = "raytrain" if verb == "fly" else f"raytrain {words[0]}"
    assert (code, told["status"], told["error"]["where"]) == (2, "invalid", where)
    assert told["error"]["what"].startswith("No such ")
    assert told["error"]["remedy"] == f"see {where} --help"
    assert told["error"]["what"] in err


RESULT = Result(name="job", status="finished", exit_code=0, path=RUN, steps=3, samples=24)
FRAMES = 'Traceback (your code only):\n  File "tasks.py", line 7, in loss\n    raise KeyError("x")\nKeyError: \'x\'\n'
RAISED = "the task raised KeyError: 'x' (step 3 was not applied)"
FAILED = replace(RESULT, status="failed", exit_code=1, error=f"{FRAMES}{RAISED}")
LOST = replace(RESULT, status="failed", exit_code=1, error="no worker is left")
RESULTS = [
    (RESULT, None),
    (replace(RESULT, status="stopped", exit_code=130), None),
    (replace(RESULT, status="stopped", exit_code=143), None),
    (FAILED, {"what": RAISED, "where": "tasks.py, line 7", "remedy": ""}),
    (LOST, {"what": "no worker is left", "where": RUN, "remedy": ""}),
]


@pytest.mark.parametrize(("result", "error"), RESULTS)
@pytest.mark.parametrize("verb", ["run", "detach", "resume", "attach"])
def test_a_run_that_has_ended_prints_its_result(
    verb: str, result: Result, error: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, work = VERBS[verb]
    Path("runs/job").mkdir(parents=True)
    result.save(LocalFolder(Path("runs/job")))
    monkeypatch.setattr(work, does(Handle(LocalFolder(Path("runs/job"))) if verb == "detach" else result))
    code, told, err = ended(words, capsys)
    where = told["path"] if error == {**(error or {}), "where": RUN} else (error or {}).get("where")
    assert (code, told["status"]) == (result.exit_code, result.status)
    assert told["error"] == (error and {**error, "where": where})
    assert {**told, "path": RUN, "error": result.error} == result.to_json()
    assert (result.error or "") in err


@dataclass
class Report:
    """A report of validate, verify or audit."""

    agree: bool = False
    clean: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"faults": ["row 7"]}

    def lines(self) -> list[str]:
        return ["row 7"]


@pytest.mark.parametrize(
    ("verb", "value", "code", "document"),
    [
        ("validate", Report(), 0, {"faults": ["row 7"]}),
        ("verify", Report(), 1, {"faults": ["row 7"]}),
        ("verify", Report(agree=True), 0, {"faults": ["row 7"]}),
        ("audit", Report(), 1, {"faults": ["row 7"]}),
        ("audit", Report(clean=True), 0, {"faults": ["row 7"]}),
        ("status", Report(), 0, {"faults": ["row 7"]}),
        (
            "doctor",
            [Check("ray", "FAIL", "not installed", "pip install ray")],
            1,
            {"checks": [{"name": "ray", "status": "FAIL", "detail": "not installed", "remedy": "pip install ray"}]},
        ),
    ],
)
def test_a_report_is_printed_whatever_it_found(
    verb: str, value: Any, code: int, document: Any,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words, work = VERBS[verb]
    monkeypatch.setattr(work, does(value))
    assert ended(words, capsys) == (code, document, "noise\n")


def process(stdout: Any, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with `--json` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-m", "raytrain_plus", *words, "--json"]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)


def test_what_a_task_and_its_processes_print_stays_off_stdout() -> None:
    Path("noisy_task.py").write_text("import os\nprint('noise')\nos.system('echo deep noise')\n")
    done = process(subprocess.PIPE, "validate", JOB, "--set", "task=noisy_task:Missing")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["what"] == "module 'noisy_task' has no 'Missing'"
    assert {"noise", "deep noise"} <= set(done.stderr.splitlines())


def test_a_full_disk_below_stdout_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = process(full, "status", "no-such-run")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "standard output cannot be written: [Errno 28] No space left on device"


def test_help_stays_text_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--json", "--help"])
    assert capsys.readouterr().out.startswith("Usage: ")


def test_an_errors_parts_are_told_apart() -> None:
    two = JobError([InputError("is missing", where="a", remedy="add it"), InputError("is odd", expected="even")])
    assert error_fields(two) == {"what": "a: is missing; is odd; expected: even", "where": "a", "remedy": "add it"}
    training = TrainingError(RAISED, FRAMES.strip())
    assert error_fields(training) == error_fields(str(training))
    lines = TrainingError(
        "the task raised ValueError: a\nb", f"{FRAMES.partition('KeyError')[0]}    ^^\nValueError: a\nb"
    )
    assert error_fields(lines)["what"] == "the task raised ValueError: a\nb"
    bug = "it broke\nTraceback (most recent call last):\n  File ours\nKeyError: 1"
    assert error_fields(bug) == {"what": "it broke", "where": "", "remedy": ""}
    given = InputError("is gone", where="x.parquet", expected="a file", remedy="restore it")
    assert error_fields(str(given)) == {
        "what": "x.parquet: is gone; expected: a file",
        "where": "",
        "remedy": "restore it",
    }


def test_a_result_is_read_with_its_error_as_a_text_or_an_object(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    FAILED.save(folder)
    assert json.loads(folder.read("result.json"))["error"] == FAILED.error
    error = {"what": "it broke", "where": "tasks.py, line 7", "remedy": "mend it"}
    folder.write("result.json", [json.dumps({**FAILED.to_json(), "error": error}).encode()])
    loaded = Result.load(folder)
    assert loaded is not None
    assert loaded.error == "tasks.py, line 7: it broke\n  fix: mend it"
    folder.write("result.json", [json.dumps({**FAILED.to_json(), "error": {"what": 7}}).encode()])
    with pytest.raises(InputError, match="error: what: 7 is not a string"):
        Result.load(folder)


def test_quiet_and_json_choose_the_view() -> None:
    assert answer.view_of(as_json=True, quiet=True) is None
    assert isinstance(answer.view_of(as_json=False, quiet=True), SummaryView)
    assert isinstance(answer.view_of(as_json=False, quiet=False), PlainView)
