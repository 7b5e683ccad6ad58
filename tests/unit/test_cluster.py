"""What is said of a cluster that cannot be joined, and of one that anybody can join."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import AuthenticationError

from raytrain_plus import Data, InputError, Job, cluster
from raytrain_plus.cluster import connected, joined
from raytrain_plus.submission import Jobs

JOB = Job(name="n", task="t:T", steps=1, data=Data(path="data", batch_size=8))
MISMATCH = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.10.1\nThis process: ..."


def test_another_ray_or_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_addresses_for_who_is_no_machine_of_the_cluster(address: str) -> None:
    with pytest.raises(InputError, match="raytrain submit JOB"), connected(JOB, address):
        pass
    with pytest.raises(InputError, match="the same command run there, by ray job submit"), joined(address, token=False):
        pass


def test_a_token_that_is_missing_or_wrong_is_told_alike_wherever_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AuthenticationError("no token was found\nand more of that")

    # Each client sets it for itself.
    for name in ("RAY_AUTH_MODE", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, os.environ.get(name, "disabled"))
    monkeypatch.setattr(cluster, "check_let_in", refused)
    monkeypatch.setattr("raytrain_plus.submission.JobSubmissionClient", refused)
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
        "address: X: the cluster asks for a token, and is not content with what it got: no token was found"
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
def test_a_cluster_open_beyond_this_machine_is_told_of_where_one_is_connected_already(
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
    assert [f"whoever reaches {open_to} can run anything" in line for line in said] == ([True] if open_to else [])
