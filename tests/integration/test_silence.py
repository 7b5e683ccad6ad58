"""A machine that disappears silently: no connection is closed, and nothing answers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from raytrain_plus import Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.collective.rendezvous import RendezvousServer
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.network import HERE, POSSIBLE, THERE, cable, raylet_behind
from tests.integration.tasks import write_data
from tests.support.worlds import Door, formation, reduced, started

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not POSSIBLE, reason="needs root and iproute2, for a network of its own"),
]


@pytest.mark.parametrize("kind", ["horovod", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_world_of_two_machines(kind: str) -> None:
    with cable() as line, ExitStack() as stack:
        group = [stack.enter_context(started(kind, where)) for where in ((), line.there)]
        rendezvous = RendezvousServer(HERE, size=2, peers=[HERE, THERE])
        stack.callback(rendezvous.close)
        door = Door(rendezvous.start(), rendezvous)
        assert [member.hear() for member in group] == [{"up": True}] * 2
        for rank, (member, address) in enumerate(zip(group, (HERE, THERE), strict=True)):
            asked = formation(rank, 2, door)
            member.tell(do="form", formation={**asked, "address": address, "server": [HERE, door.port]})
        assert [member.hear() for member in group] == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
        assert reduced(group) == [{"value": 3}, {"value": 3}]
        listening = rendezvous.published()
        assert {where for where, _ in listening[0]} == {HERE}
        assert {where for where, _ in listening[1]} == {THERE}


@pytest.mark.slow
def test_a_machine_whose_cable_is_pulled_is_given_up(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    with cable() as line, raylets(2, node_ip_address=HERE) as cluster, raylet_behind(line, cluster.address):
        undisturbed = Run(job(tmp_path, name="undisturbed", workers=Workers(min=2)))
        assert undisturbed.finish().status == "finished"
        run = Run(job(tmp_path, args={"pad_s": 0.02}, workers=Workers(min=2, max=3)))
        members = run.until_size(3)
        run.until_step(10)
        there = {node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == THERE}
        [silent] = [member for member in members if member["node"] in there]
        before = born([member for member in members if member is not silent])
        line.pull()
        recovered = run.until_told("recovered")
        assert "does not answer" in recovered["cause"]
        assert {pid: psutil.Process(pid).create_time() for pid in before} == before
        result = run.finish()
        assert result.steps == 200
        assert audit(result.path).clean
        np.testing.assert_allclose(run.losses(), undisturbed.losses(), rtol=0, atol=1e-5)
