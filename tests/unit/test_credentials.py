"""Credentials in addresses are refused in user input, stripped from other texts, and never written."""

from __future__ import annotations

import doctest
import io
import itertools
import json
import logging
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from raytrain_plus import Data, Job, JobError, credentials
from raytrain_plus.cli import main as cli
from raytrain_plus.controller.record.journal import Beginning
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.credentials import credential_in, hide_credentials, without_credentials
from raytrain_plus.errors import DataError, InputError, RunError, StorageError, TaskError, TrainingError
from raytrain_plus.job.setting_types import flatten, settings_of
from raytrain_plus.job.yaml import load_job
from raytrain_plus.launch.ray_address import check_cluster, dashboard_of, named_dashboard
from raytrain_plus.runs.folder import Fence
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.folders.local import LocalFolder

SECRET = "hunter2"
FORMS = [
    "s3://KEY:hunter2@bucket/runs",
    "S3://KEY:hunter2@bucket/runs?region=eu-west-1",
    "s3://hunter2@bucket/runs",
    "s3://KEY%3Ahunter2%40bucket/runs",
    "s3://KEY:hunter2%2Fmore@bucket/runs",
    "s3://KEY:12/hunter2@bucket/runs",
    "s3://KEY:more?hunter2@bucket/runs",
    "s3://KEY:more@hunter2@bucket/runs",
    "s3://KEY:hunter2/runs",
    "s3%3A%2F%2FKEY%3Ahunter2%40bucket/runs",
    "s3:/KEY:hunter2@bucket/runs",
    "s3://bucket/runs?secret_key=hunter2",
    "s3://bucket/runs?region=x&SECRET_KEY=hunter2",
    "s3://bucket/runs?access_key=hunter2&secret_key=more",
    "s3://bucket/runs?region=x;session_token=hunter2",
    "s3://bucket/runs?secret%5Fkey=hunter2",
    "s3://bucket/runs?%73ecret%255Fkey=hunter2",
    "s3://bucket/runs%3Fsecret_key%3Dhunter2",
    "s3://bucket/runs#secret_key=hunter2",
    "s3://bucket/runs?X-Amz-Signature=hunter2",
    "s3://bucket/runs?endpoint_override=http://me:hunter2@host:9000",
    "s3://bucket/runs?endpoint_override=http%3A%2F%2Fme%3Ahunter2%40host",
    "s3://bucket/runs?endpoint_override=http://host/%3Ftoken=hunter2",
    "gs://me:hunter2@bucket/runs",
    "abfs://box:hunter2@account.dfs.core.windows.net/runs",
    "abfs://box@account.dfs.core.windows.net/runs?sv=2024&sig=hunter2&se=2030",
    "abfss://box@account.dfs.core.windows.net/runs?SIG=hunter2",
    "abfs://box@account.dfs.core.windows.net/runs?client_secret=hunter2",
    "hdfs://me:hunter2@host:9000/runs",
    "https://me:hunter2@host/x",
    "https://hunter2@host/x",
    "https://host/x?api-key=hunter2",
    "https://host/x?a=b&Authorization=hunter2",
    "postgresql://me:hunter2@host/db",
]
SOME = [FORMS[0], FORMS[9], FORMS[11], FORMS[20], FORMS[-1]]
"""A selection of forms, for tests of many places."""
LEGITIMATE = [
    "runs@home/a:b",
    "C:/runs",
    "C:/users/me:you@home",
    "s3://bucket/runs?region=eu-west-1&scheme=http&endpoint_override=http://127.0.0.1:9000/",
    "s3://bucket/user@runs?tls_ca_file_path=/etc/ca.pem&force_virtual_addressing=true&allow_bucket_creation=1",
    "gs://anonymous@bucket/runs?retry_limit_seconds=1&project_id=x",
    "abfs://box@account.dfs.core.windows.net/runs?enable_tls=false&tenant_id=a&client_id=b&blob_storage_authority=c",
    "hdfs://me@host:9000/user@x?kerb_ticket=/tmp/krb5&replication=1",
    "file:///data",
    "http://[::1]:8265",
    "http://head:8265",
    "ssh://git@host/x",
    "https://host/x?tokenizer=gpt2&max_tokens=5",
    "postgresql://${env:USER}:${env:PASSWORD}@host/db?password=${env:PASSWORD}",
]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(credentials).failed == 0


@pytest.mark.parametrize("address", FORMS)
def test_a_credential_is_found_and_stripped_in_every_form(address: str) -> None:
    assert credential_in(address)
    stripped = without_credentials(address, whole=True)
    assert SECRET not in credential_in(address) + stripped
    assert not credential_in(stripped)
    assert without_credentials(stripped, whole=True) == stripped
    for said in (
        "cannot parse '{}'",
        'no answer from "{}": timed out',
        "GET {} failed, see a@b",
        "--set storage={}",
        "[{}]",
        "{}\n{}",
    ):
        text = said.replace("{}", address)
        assert SECRET not in without_credentials(text), text
        assert SECRET not in json.dumps(hide_credentials({"a": [text], text: 1}))


@pytest.mark.parametrize("address", LEGITIMATE)
def test_text_without_credentials_is_unchanged(address: str) -> None:
    assert credential_in(address) == ""
    assert without_credentials(f"cannot read {address} of 'a@b:c'") == f"cannot read {address} of 'a@b:c'"


@pytest.mark.parametrize(
    "text",
    ["ab://" * 50_000, "s3://b?" + "%25" * 50_000, "s3://b:x " * 3_000, "http://" + "${env:x" * 30_000, "?a=" * 99_999],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    credential_in(text)
    without_credentials(text)
    assert time.process_time() - began < 5


def test_every_error_strips_its_texts() -> None:
    said = f"no answer from {FORMS[0]}"
    errors: list[Exception] = [
        RunError(said),
        InputError(said, said, said, said),
        DataError(said, where=said),
        TaskError(said, user_traceback=f'  File "x.py"\n    open("{FORMS[0]}")'),
        TrainingError(said, said),
        StorageError(said),
        StorageError(28, said, FORMS[0]),
        JobError([InputError(said, where=FORMS[0])]),
    ]
    for error in errors:
        assert SECRET not in f"{error} {error!r} {vars(error)}"
        assert SECRET not in "".join(traceback.format_exception(error))


# Job files.

GOOD = {"task": "examples.digits:Digits", "steps": 2, "data": {"path": "data", "batch_size": 8}}


def settings(cls: type = Job, prefix: str = "") -> Iterator[str]:
    """Yield every key of a job, dotted."""
    for name, setting in settings_of(cls).items():
        yield f"{prefix}{name}"
        if setting.group is not None:
            yield from settings(setting.group, f"{prefix}{name}.")


PLACES = [*settings(), "args.hub", "args.hubs.first", "unknown", "data.unknown"]


@pytest.mark.parametrize("key", PLACES)
def test_no_setting_of_a_job_file_accepts_a_credential(key: str, tmp_path: Path) -> None:
    """In the past `data.path` was accepted with `data.prepare`, and `storage` with its parameters."""
    for number, address in enumerate(FORMS if key in ("storage", "data.path") else SOME):
        file = tmp_path / f"{number}.yaml"
        values = json.loads(json.dumps(GOOD)) | {"data": {**GOOD["data"], "prepare": "a:b"}}  # type: ignore[dict-item]
        *groups, last = key.split(".")
        inner = values
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = address
        file.write_text(yaml.safe_dump(values))
        with pytest.raises(JobError) as in_file:
            load_job(file)
        file.write_text(yaml.safe_dump(GOOD))
        with pytest.raises(JobError) as overridden:
            load_job(file, [f"{key}={address}"])
        for caught in (in_file, overridden):
            assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.problems}"
            assert key.split(".")[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "storage: s3://KEY:hunter2@bucket/runs",
            "job.yaml:4:1 storage: the address contains a credential: a user name",
        ),
        (
            "storage: s3://b/r?a=b&secret_key=hunter2",
            "job.yaml:4:1 storage: the address contains a credential: the query",
        ),
        ("args: {to: ['x', 's3://KEY:hunter2@b']}", "args.to[1]: the address contains a credential"),
        ("args: {'s3://KEY:hunter2@b': 1}", "args: the address contains a credential"),
        ("args: {to: 's3://K:hunter2@b'}", "refer to an environment variable with ${env:NAME}"),
        ("evaluate: {path: 's3://K:hunter2@b', every_steps: 1}", "evaluate.path: the address contains a credential"),
        ("trackers: ['https://hunter2@host']", "trackers[0]: the address contains a credential"),
        ("s3://KEY:hunter2@b: 1", "unknown setting"),
        ("args: !!s3://KEY:hunter2@b x", "is not allowed"),
        ("steps: s3://KEY:hunter2@b", "steps"),
    ],
)
def test_the_refusal_says_where_and_what_and_not_the_secret(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"task: a:B\ndata: {{path: x, batch_size: 8}}\nsteps: 1\n{text}\n")
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert SECRET not in str(caught.value)
    assert expected in str(caught.value)


def test_a_job_in_python_is_refused_and_a_reference_is_not() -> None:
    data = Data(path="data", batch_size=8)
    for args in ({"a": FORMS[0]}, {"a": {"b": [FORMS[0]]}}):
        with pytest.raises(JobError, match="contains a credential"):
            Job(name="n", task="a:B", steps=1, data=data, args=args)
    job = Job(name="n", task="a:B", steps=1, data=data, args={"a": LEGITIMATE[-1]}, storage=LEGITIMATE[2])
    assert LEGITIMATE[-1] in job.to_yaml()
    assert dict(flatten(job))["storage"] == LEGITIMATE[2]


# The command line.

VERBS = [
    ["run", "{}"],
    ["run", "job.yaml", "--set", "storage={}"],
    ["run", "job.yaml", "--set", "data={path: '{}', batch_size: 8}"],
    ["run", "job.yaml", "--set", "{}=1"],
    ["run", "job.yaml", "{}"],
    ["submit", "job.yaml", "--set", "storage={}"],
    ["submit", "job.yaml", "--address", "{}"],
    ["validate", "job.yaml", "--set", "args.x={}", "--json"],
    ["validate", "job.yaml", "--cluster", "{}"],
    ["verify", "job.yaml", "--workers", "{}"],
    ["resume", "{}"],
    ["resume", "run", "--storage", "{}"],
    ["resume", "{}", "--address", "http://127.0.0.1:9"],
    ["resume", "s3://b/run", "--storage", "{}", "--address", "http://127.0.0.1:9"],
    ["resume", "s3://b/run", "--set", "storage={}", "--address", "http://127.0.0.1:9"],
    *(
        [verb, *words]
        for verb in ("attach", "logs", "status", "stop")
        for words in (["{}"], ["run", "--storage", "{}"], ["run", "--address", "{}"])
    ),
    ["rescale", "{}", "--min", "1"],
    ["rescale", "run", "--min", "{}"],
    ["export", "{}", "--to", "model"],
    ["export", "run", "--to", "{}/model"],
    ["export", "run", "--to", "model", "--format", "{}"],
    ["audit", "{}", "--json"],
    ["audit", "run", "--storage", "{}"],
]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_no_command_repeats_a_credential(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(GOOD))
    for address in [form for form in FORMS if form.startswith("http")] if words[-2] == "--address" else SOME:
        told = [word.replace("{}", address) for word in words]
        code = cli._guarded(partial(cli.cli.main, told, standalone_mode=False)).code
        out, err = capfd.readouterr()
        assert code == 2, err
        assert SECRET not in out + err, address
        assert "Traceback" not in err
        assert not [path for path in tmp_path.rglob("*") if SECRET in str(path)]


def test_an_internal_error_is_shown_without_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError(f"cannot parse '{FORMS[0]}'")

    assert cli._guarded(fail).code == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "s3://***@bucket/runs" in err
    assert SECRET not in err


@pytest.mark.parametrize(
    "address", ["http://me:hunter2@head:8265", "me:hunter2@head:6379", "http://head?token=hunter2"]
)
def test_a_cluster_address_with_a_credential_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for use in (
        lambda: check_cluster(address),
        lambda: dashboard_of(address),
        lambda: dashboard_of(None),
        named_dashboard,
    ):
        with pytest.raises(InputError, match="the address contains a credential") as caught:
            use()
        assert SECRET not in str(caught.value)
    check_cluster("10.0.0.1:6379")
    check_cluster("auto")


# The output of a run.


def test_texts_from_others_are_stripped_before_they_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cause of death is text from Ray; an error is text from any library that the task uses."""
    run = LocalFolder(tmp_path / "run")
    record = RunRecord(run, 8, 100, None, Past())
    said = f"no answer from {FORMS[0]} at all"
    record.waits(said)
    record.open(Fence(run, 0), Beginning("name: run\n", {}, {"files": []}, "here:1"))
    record.not_saved(1, said)
    record.waits(f"again {said}")
    with caplog.at_level(logging.DEBUG):
        result = record.finish("run", "failed", f"{said}\nTraceback: {FORMS[11]}", None, 0.0)
    followed = list(itertools.islice(record.journal.follow(0, 1.0), 10))
    record.journal.close()
    shown = io.StringIO()
    print(result, result.to_json(), followed, caplog.text, file=shown)
    files = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert len(followed) == 6
    assert b"".join(files).count(b"s3://***@bucket/runs") == 5
    assert SECRET.encode() not in b"".join([*files, shown.getvalue().encode()])
