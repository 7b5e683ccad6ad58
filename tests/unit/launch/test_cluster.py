"""Errors for a cluster that cannot be joined, and the warning about one that requires no token."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray._private import worker
from ray._raylet import AuthenticationTokenLoader
from ray.exceptions import AuthenticationError, GetTimeoutError

from raytrain_plus import Data, InputError, Job, RunError
from raytrain_plus.install.ray_folder import LONGEST, ray_folder
from raytrain_plus.launch import cluster
from raytrain_plus.launch.cluster import connected, joined
from raytrain_plus.launch.ray_jobs import Jobs
from raytrain_plus.ray_compat import socket_of_our_own_ray

JOB = Job(name="n", task="t:T", steps=1, data=Data(path="data", batch_size=8))
MISMATCH = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.10.1\nThis process: ..."


def test_another_version_of_ray_or_python_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError(MISMATCH)

    monkeypatch.setattr(cluster, "check_let_in", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(InputError, match=r"started with: Ray: 2\.59\.0 Python: 3\.10\.1") as told,
            joined(address, token=False),
        ):
            pass
    assert address in str(told.value)


def test_a_ray_that_does_not_start_in_time_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []

    def init(**_: Any) -> None:
        started.append(1)
        if len(started) in failing:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    failing = {1}
    with connected(JOB, None):
        assert len(started) == 2
    said = capsys.readouterr().err
    assert "Ray did not start on this machine: The current node timed out during startup.; trying once more" in said
    started.clear()
    failing = {1, 2}
    with pytest.raises(RunError, match="try again when the machine is less busy"), connected(JOB, None):
        pass
    assert len(started) == 2


def test_sockets_of_a_run_s_own_ray_fit_whatever_the_temporary_folder_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("a" * 60)
    long.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TMPDIR", str(long))
    with connected(JOB, None):
        assert socket_of_our_own_ray().startswith("/tmp/ray/")
    assert ray_folder({"TMPDIR": "x" * (LONGEST + 1)}) == "/tmp/ray"
    assert ray_folder({"TMPDIR": "x" * LONGEST}) is ray_folder({}) is None
    assert ray_folder({"TMPDIR": "x" * 99, "RAY_TMPDIR": "/t"}) is None


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_addresses_that_only_outside_machines_use_are_refused(address: str) -> None:
    with pytest.raises(InputError, match="raytrain submit JOB"), connected(JOB, address):
        pass
    with (
        pytest.raises(InputError, match="run the same command there with ray job submit"),
        joined(address, token=False),
    ):
        pass


def test_a_missing_or_wrong_token_gives_the_same_error_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AuthenticationError("no token was found\nand more of that")

    # Each client sets these variables for its own process.
    for name in ("RAY_AUTH_MODE", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, os.environ.get(name, "disabled"))
    monkeypatch.setattr(cluster, "check_let_in", refused)
    monkeypatch.setattr("raytrain_plus.launch.ray_jobs.JobSubmissionClient", refused)
    said = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for ask in (lambda: joined(address, token=True), lambda: connected(JOB, address)):
            with pytest.raises(InputError) as told, ask():
                pass
            said.append(str(told.value).replace(address, "X"))
    with pytest.raises(InputError) as told:
        Jobs("http://X")
    said.append(str(told.value).replace("http://X", "X"))
    assert said[0].splitlines()[0] == (
        "address: X: authentication failed; the cluster requires a valid token: no token was found"
    )
    assert all(word in said[0] for word in ("~/.ray/auth_token", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE=token"))
    assert said == said[:1] * 3


def test_a_connection_through_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.client, "is_connected", lambda: True)
    with pytest.raises(InputError, match=r"Ray Client \(ray://\)") as told, connected(JOB, None):
        pass
    assert "raytrain submit JOB" in str(told.value)


@pytest.mark.parametrize(
    ("nodes", "mode", "open_to"),
    [
        (["127.0.0.1", "10.0.0.5"], None, "10.0.0.5"),
        (["127.0.0.1", "10.0.0.5"], "disabled", "10.0.0.5"),
        (["127.0.0.1", "10.0.0.5"], "token", None),
        (["127.0.0.1"], None, None),
    ],
)
def test_an_existing_connection_to_an_open_cluster_is_warned_about(
    nodes: list[str],
    mode: str | None,
    open_to: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": node, "Alive": True} for node in nodes])
    with connected(JOB, None):
        pass
    said = capsys.readouterr().err.splitlines()
    assert [f"anyone who can reach {open_to} can run any code" in line for line in said] == ([True] if open_to else [])


def test_a_ray_that_this_process_started_is_not_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`raytrain verify` starts one, and its runs join it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    seen = ["10.0.0.5"]
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": node, "Alive": True} for node in seen])
    said = []
    for head, machines in ((True, ["10.0.0.5"]), (False, ["10.0.0.5"]), (True, ["10.0.0.5", "10.0.0.6"])):
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(is_head=lambda head=head: head))
        seen[:] = machines
        with connected(JOB, None):
            pass
        said.append("the cluster requires no token" in capsys.readouterr().err)
    # Other machines have joined the last one.
    assert said == [False, True, True]


def test_a_slow_start_of_ray_is_reported_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain `Exception`; without special handling it would be reported as our bug."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because\nof this or that.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RunError) as told, connected(JOB, None):
        pass
    first, load, fix = str(told.value).splitlines()
    assert first == (
        "Ray did not start on this machine: The current node timed out during startup. This could happen because"
    )
    assert re.fullmatch(
        rf"  this machine now: load average \d+\.\d on {os.cpu_count()} cores, [\d.]+ GB of [\d.]+ GB memory free", load
    )
    assert fix.startswith("  fix: try again when the machine is less busy")


def test_a_slow_answer_of_ray_is_reported_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", list)
    said = r"Ray failed: GetTimeoutError: Get timed out\n  this machine now: load average"
    with pytest.raises(RunError, match=said), connected(JOB, None):
        raise GetTimeoutError("Get timed out")


@pytest.mark.parametrize(
    ("mode", "here", "right", "asked"),
    [
        (None, True, True, [None, "token"]),
        (None, True, False, [None, "token"]),
        (None, False, True, [None]),
        ("disabled", True, True, ["disabled"]),
    ],
)
def test_a_stored_token_is_sent_to_a_cluster_that_requires_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str | None, here: bool, right: bool, asked: list[str | None]
) -> None:
    """Without this, users would have to know that they must set RAY_AUTH_MODE=token."""
    token = tmp_path / "token"
    if here:
        token.write_text("a-token-of-this-test-alone")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    # Makes `monkeypatch` restore the variable afterwards.
    monkeypatch.setenv("RAY_AUTH_MODE", mode or "disabled")
    if mode is None:
        del os.environ["RAY_AUTH_MODE"]
    AuthenticationTokenLoader.instance().reset_cache()
    seen: list[str | None] = []

    def check(address: str) -> None:
        seen.append(os.environ.get("RAY_AUTH_MODE"))
        if seen[-1] != "token" or not right:
            raise AuthenticationError("no token was found")

    monkeypatch.setattr(cluster, "check_let_in", check)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    let_in = asked[-1] == "token" and right
    with socket.create_server(("127.0.0.1", 0)) as server:
        expected = contextlib.nullcontext() if let_in else pytest.raises(InputError, match="export RAY_AUTH_MODE=token")
        with expected, connected(JOB, f"127.0.0.1:{server.getsockname()[1]}"):
            assert os.environ["RAY_AUTH_MODE"] == "token"
    # The next cluster may require no token.
    assert (seen, os.environ.get("RAY_AUTH_MODE")) == (asked, mode)
