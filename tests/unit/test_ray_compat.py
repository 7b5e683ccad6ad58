"""Ray's private interfaces: their use, and the single warning if one is missing."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray._private import ray_logging, state, worker
from ray.autoscaler.v2 import sdk

from raytrain_plus import ray_compat


def test_draining_nodes_have_their_deadline_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.GlobalState, "get_draining_nodes", lambda self: {"a": 1500, "b": 0})
    assert ray_compat.draining_nodes() == {"a": 1.5, "b": None}


class Gcs:
    """A stand-in for Ray's GCS client that records requests and gives fixed answers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.says = (True, "")

    def __call__(self, address: str) -> Gcs:
        assert address == "head:6379"
        return self

    def drain_node(self, *arguments: Any, timeout: float) -> tuple[bool, str]:
        self.told.append(arguments)
        return self.says


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Gcs:
    gcs = Gcs()
    monkeypatch.setattr(ray._raylet, "GcsClient", gcs)
    here = SimpleNamespace(gcs_address="head:6379", get_node_id=lambda: "ab12")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    return gcs


def test_the_drain_deadline_is_in_milliseconds(gcs: Gcs, caplog: pytest.LogCaptureFixture) -> None:
    soon = time.time() + 60
    assert ray_compat.drain_node("head:6379", "ab12", "taken back", soon)
    [(node, reason, why, deadline_ms)] = gcs.told
    assert (node, reason, why) == ("ab12", 2, "taken back")
    assert 0 <= deadline_ms - soon * 1000 < 1.1
    gcs.says = (False, "busy")
    assert ray_compat.drain_node("head:6379", "ab12", "taken back", soon) is False
    [record] = caplog.records
    assert record.message == "Ray refused to drain node ab12: busy"


@pytest.mark.parametrize("over_s", [0, 1, 1e9])
def test_a_deadline_in_the_past_becomes_now(gcs: Gcs, over_s: float) -> None:
    before = time.time()
    assert ray_compat.drain_node("head:6379", "ab12", "taken back", before - over_s)
    [(*_, deadline_ms)] = gcs.told
    assert before * 1000 < deadline_ms < time.time() * 1000 + 2.1


def test_a_node_with_an_earlier_deadline_is_unchanged(monkeypatch: pytest.MonkeyPatch, gcs: Gcs) -> None:
    soon = float(round(time.time()) + 60)
    known: dict[str, int] = {"cd34": 1}
    monkeypatch.setattr(state.GlobalState, "get_draining_nodes", lambda self: known)
    for before_ms in (soon * 1000, soon * 1000 - 1):
        known["ab12"] = int(before_ms)
        assert ray_compat.drain_this_node("taken back", soon)
    assert gcs.told == []
    # A later or missing deadline is replaced by this one.
    for later_ms in (soon * 1000 + 1, 0):
        known["ab12"] = int(later_ms)
        assert ray_compat.drain_this_node("taken back", soon)
    del known["ab12"]
    assert ray_compat.drain_this_node("taken back", soon)
    assert gcs.told == [("ab12", 2, "taken back", int(soon * 1000))] * 3


def test_a_ray_without_draining_is_reported(
    monkeypatch: pytest.MonkeyPatch, gcs: Gcs, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(Gcs, "drain_node")
    assert ray_compat.drain_node("head:6379", "ab12", "taken back", 1) is None
    assert "drain_node" in caplog.text


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("get_draining_nodes", ray_compat.draining_nodes),
        ("get_max_resources_from_cluster_config", ray_compat.most_there_can_be),
    ],
)
def test_a_missing_interface_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, ask: object
) -> None:
    monkeypatch.delattr(state.GlobalState, name)
    assert ask() is None  # type: ignore[operator]
    [record] = caplog.records
    assert f"lacks an interface of Ray {ray_compat.SEEN}" in record.message
    assert name in record.message


def test_the_maximum_resources_of_an_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.GlobalState, "get_max_resources_from_cluster_config", lambda self: {"CPU": 8})
    assert ray_compat.most_there_can_be() == {"CPU": 8.0}
    monkeypatch.setattr(state.GlobalState, "get_max_resources_from_cluster_config", lambda self: None)
    assert ray_compat.most_there_can_be() is None


@pytest.mark.parametrize(("version", "there"), [(None, False), ("0", False), ("4", True)])
def test_an_autoscaler_is_detected_by_its_reports(
    monkeypatch: pytest.MonkeyPatch, version: str | None, there: bool
) -> None:
    status = SimpleNamespace(stats=SimpleNamespace(autoscaler_version=version))
    monkeypatch.setattr(ray_compat.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="a:1"))
    monkeypatch.setattr(sdk, "get_cluster_status", lambda address: status)
    assert ray_compat.has_autoscaler() == there


def test_internal_settings_are_given_to_a_ray_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"worker_niceness": 0, "gcs_rpc_server_reconnect_timeout_s": ray_compat.WITHOUT_GCS_S}
    assert ray_compat.settings_of_our_own_ray() == known
    monkeypatch.setattr(ray_compat.ray, "__version__", "3.0.1")
    assert ray_compat.settings_of_our_own_ray() == {}


def test_a_ray_without_a_monitor_ends_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[None] = []
    monkeypatch.setattr(ray_compat.ray, "shutdown", lambda: ended.append(None))
    ray_compat.end_our_own_ray()
    assert not caplog.records
    monkeypatch.delattr(worker, "_global_node")
    ray_compat.end_our_own_ray()
    assert "Ray takes a second longer to end" in caplog.text
    assert len(ended) == 2


def shown(line: str) -> list[str]:
    """Return what Ray would print of a line that comes from a raylet."""
    batch = {"lines": [line], "pid": "raylet", "is_err": False, "ip": "", "job": ""}
    return [line for printed in ray_logging.stdout_deduplicator.deduplicate(batch) for line in printed["lines"]]


def test_rays_messages_about_deaths_are_suppressed() -> None:
    death = f"{ray_compat.DEATH} by an unexpected system error. To troubleshoot ... (one)"
    with ray_compat.silent_about_deaths():
        assert shown(death) == []
        assert shown("what a worker printed") == ["what a worker printed"]
    assert shown(death) == [death]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_workers_print_is_plain_outside_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(ray_logging, "RAY_DEDUP_LOGS", True)
    for name in ("RAY_COLOR_PREFIX", "RAY_DEDUP_LOGS", "RAY_DEDUP_LOGS_ALLOW_REGEX"):
        monkeypatch.delenv(name, raising=False)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    ray_logging.stdout_deduplicator.flush()
    with ray_compat.silent_about_deaths(), ray_compat.plain_outside_terminals():
        for pid in (17, 18, 19):
            printed(pid, "a line of all workers")
            printed(pid, f"{ray_compat.DEATH} by an unexpected system error")
    ray_logging.stdout_deduplicator.flush()
    lines = capsys.readouterr().out.splitlines()
    if terminal:
        assert len(lines) == 1
        assert lines[0].startswith("\x1b[36m(Worker pid=17)\x1b[0m")
    else:
        assert lines == [f"(Worker pid={pid}) a line of all workers" for pid in (17, 18, 19)]
    assert "RAY_COLOR_PREFIX" not in os.environ


def printed(pid: object, line: str) -> None:
    """Let Ray's driver receive a line that this process wrote on its standard output."""
    worker.print_to_stdstream({"lines": [line], "pid": pid, "is_err": False, "actor_name": "Worker"}, False)


RAYS = "[2026-01-05 10:00:00,123 E 17 17] rpc.cc:1: no answer"


def test_rays_own_lines_go_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_COLOR_PREFIX", "0")
    monkeypatch.setattr(ray_logging, "RAY_DEDUP_LOGS", False)
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path), node_ip_address="127.0.0.1")
    monkeypatch.setattr(worker, "_global_node", node)
    logger = logging.getLogger("ray")
    before = logger.handlers[:]
    with ray_compat.own_lines_apart("digits") as begin:
        printed(17, RAYS)
        assert RAYS in capsys.readouterr().out, "Ray's lines are shown while it starts"
        file = begin()
        assert file is not None
        assert file.parent == tmp_path
        printed("raylet", "spilled 2 objects")
        printed(17, RAYS)
        printed(17, "from the task")
        logger.error("from the driver")
    assert capsys.readouterr().out == "(Worker pid=17) from the task\n"
    kept = file.read_text().splitlines()
    assert kept[:2] == ["(raylet) spilled 2 objects", f"(Worker pid=17) {RAYS}"]
    assert kept[2].endswith("from the driver")
    assert logger.handlers == before
    printed("raylet", "spilled 3 objects")
    assert "spilled 3" in capsys.readouterr().out


def test_repeated_prints_are_counted_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_logging, "RAY_DEDUP_LOGS", True)
    for pid in (17, 18, 19):
        printed(pid, "a line of all workers")
    capsys.readouterr()
    ray_compat.show_repeated_prints()
    assert "[repeated 2x across cluster]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "own"),
    [
        (RAYS, True),
        ("[2026-01-05 10:00:00.123: W horovod/common/stall_inspector.cc:107] One or more tensors", True),
        ("2026-01-05 10:00:00,123\tWARNING worker.py:12 -- slow", True),
        ("*** SIGTERM received at time=1795581655 on cpu 1 ***", True),
        ("    @     0x7f2a4f0 (unknown)", True),
        ("2026-01-05 10:00:00,123 WARNING digits: slow", False),
        ("[2026-01-05] epoch 3", False),
        ("/task.py:3: UserWarning: slow", False),
    ],
)
def test_lines_of_libraries_are_recognised(line: str, own: bool) -> None:
    assert ray_compat.rays_own(17, line) == own


def test_a_missing_filter_of_rays_output_is_tolerated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ray_logging, "stdout_deduplicator")
    with ray_compat.silent_about_deaths():
        pass
    assert "stdout_deduplicator" in caplog.text


def test_missing_internals_of_ray_data_are_tolerated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stats = pytest.importorskip("ray.data._internal.stats")
    head = {"NodeID": "ab", "Alive": True, "Resources": {ray_compat.HEAD: 1.0}}
    monkeypatch.setattr(ray_compat.ray, "nodes", lambda: [head])
    monkeypatch.delattr(stats, "_StatsActor")
    ray_compat.ray_data_on_the_head()
    [record] = caplog.records
    assert "_StatsActor" in record.message
