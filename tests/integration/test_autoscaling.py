"""Runs on a cluster with a real autoscaler: nodes are added when a run lacks them, and removed when it is done.

Ray's own autoscaler, with the provider that starts its nodes as processes on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.state import state
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

from raytrain_plus import Data, Workers, attach
from raytrain_plus.ray_compat import has_autoscaler
from tests.integration.conftest import end_runs
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(180)

PAD_S = 0.02
STORE = 80_000_000
"""Size of each node's object store in bytes."""
IDLE_MINUTES = 0.05
"""Minutes after which an idle node is removed."""
LATE_S = 60.0
"""Maximum seconds of each wait."""


@contextmanager
def autoscaled(head_cpus: int, most: int) -> Iterator[Callable[[int], None]]:
    """Start a head, to which the autoscaler adds up to `most` nodes of one CPU each, and connect this process.

    Yields a function that sets another maximum.
    """
    # Sockets are below it, and their names must be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        address = f"{ray.util.get_node_ip_address()}:{free_port()}"
        file = Path(folder) / "cluster.json"

        def allow(most: int) -> None:
            # The autoscaler reads it again every second.
            whole = file.with_suffix(".new")
            whole.write_text(json.dumps(cluster_file(address, head_cpus, most)))
            whole.rename(file)

        allow(most)
        head = started(Path(folder), file, address, head_cpus)
        try:
            until(lambda: listens(address) or head.poll() is not None, "a head")
            assert head.poll() is None, (Path(folder) / "head.log").read_text()
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            until(has_autoscaler, "an autoscaler")
            yield allow
        except BaseException:
            end_runs()
            raise
        finally:
            ray.shutdown()
            end(head, folder)


def cluster_file(address: str, head_cpus: int, most: int) -> dict[str, Any]:
    """Return the content of the cluster file that `ray up` leaves on a head."""
    return {
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": IDLE_MINUTES,
        "upscaling_speed": 1.0,
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "cluster_synced_files": [],
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": STORE},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        },
    }


def started(folder: Path, file: Path, address: str, cpus: int) -> subprocess.Popen[bytes]:
    """Start the head in its own session."""
    host, _, port = address.rpartition(":")
    with (folder / "head.log").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(f"--node-ip-address={host}", f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={folder}"),
                *(f"--autoscaling-config={file}", f"--object-store-memory={STORE}", "--include-dashboard=false"),
                *(f"--ray-client-server-port={free_port()}", "--dashboard-agent-listen-port=0"),
            ],
            env={
                **os.environ,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_FAKE_CLUSTER": "1",
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                "RAY_enable_autoscaler_v2": "1",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(head: subprocess.Popen[bytes], folder: str) -> None:
    """End the head and all processes that it started directly or indirectly: they name the folder."""
    found = {}
    for above in of(folder):
        with suppress(psutil.NoSuchProcess):
            found |= {process.pid: process for process in (above, *above.children(recursive=True))}
    for process in found.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait(timeout=10)
    _, alive = psutil.wait_procs(found.values(), timeout=10)
    left = [process for process in [*alive, *of(folder)] if running(process)]
    assert not left


def of(folder: str) -> list[psutil.Process]:
    """Return the processes that name the folder."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or ())
    ]


def running(process: psutil.Process) -> bool:
    """Return whether the process runs: it is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def free_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def until(holds: Callable[[], object], what: str, timeout_s: float = LATE_S) -> float:
    """Wait until `holds`; return the seconds that it took."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + timeout_s, what
        time.sleep(0.05)
    return time.monotonic() - begun


def nodes() -> list[str]:
    """Return the nodes that are alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def asked() -> int:
    """Return the number of placement groups that wait for room: the autoscaler's input."""
    return sum(group["state"] == "PENDING" for group in ray.util.placement_group_table().values())


def sizes(run: Run) -> list[int]:
    return [len(view["members"]) for view in run.events("view_formed")]


@pytest.mark.slow
def test_nodes_are_added_on_request_and_removed_when_idle(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    with autoscaled(head_cpus=1, most=0) as allow:
        run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=1, max=4), steps=5000))
        [first] = run.until_size(1)
        run.until_step(10)
        assert (len(nodes()), asked()) == (1, 3)
        allow(2)
        came = until(lambda: len(nodes()) == 3, "two nodes more")
        run.until_size(3)
        # A fourth node is requested but not available; the run does not wait for it.
        assert asked() == 1
        run.until_step(run.committed() + 10)
        attach(run.folder).rescale(max=1)
        assert run.until_size(1)[0]["pid"] == first["pid"]
        went = until(lambda: len(nodes()) == 1, "the head alone")
        print(f"two nodes came within {came:.1f} s, and went within {went:.1f} s")
        assert asked() == 0
        run.until_step(run.committed() + 10)
        assert len(nodes()) == 1
        attach(run.folder).stop()
        result = run.finish()
        assert (result.status, result.recoveries, run.events("worker_lost")) == ("stopped", 0, [])
        assert (sizes(run)[0], max(sizes(run)), sizes(run)[-1]) == (1, 3, 1)
        assert len(run.losses()) == result.steps


@pytest.mark.slow
def test_the_node_on_which_a_run_streamed_its_data_is_removed(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    data = Data(path=str(tmp_path / "data"), batch_size=48, shards=8, cache_mb=0)
    with autoscaled(head_cpus=0, most=1):
        [head] = nodes()
        run = Run(job(tmp_path, args={"pad_s": PAD_S}, data=data, workers=Workers(min=1), steps=5000))
        [member] = run.until_size(1)
        assert member["node"] != head
        until(lambda: len(ray_datas_own()) >= 2, "Ray Data")
        run.until_step(run.committed() + 20)
        assert set(ray_datas_own().values()) == {head}
        attach(run.folder).stop()
        run.finish()
        until(lambda: nodes() == [head], "the head alone")


def ray_datas_own() -> dict[str, str]:
    """Return the cluster-wide actors of Ray Data, and their nodes."""
    return {
        actor["ActorClassName"]: actor["Address"]["NodeID"]
        for actor in state.actor_table(None).values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] not in ("WorkerActor", "Controller")
    }
