"""Horovod Elastic: when one worker dies, the others form a new ring and continue. As a module: a worker.

Horovod blacklists the whole host of a dead worker, and gives up if no other host is left. So each worker gets a host
of its own: four spellings of this machine's loopback address, for which no ssh is needed.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers.model import WORKERS, Log, kill_some, started, training

WORKER = "tests.benchmarks.peers.horovod_elastic"
HOSTS = ("localhost", "127.0.0.1", "127.0.1", "127.1")


def measure(folder: Path, kills: int, *, model: str = "byte_gpt") -> list[Incident]:
    """Kill one worker in each of `kills` runs under `folder`: Horovod does not replace it."""

    def start(run: Path) -> AbstractContextManager[object]:
        script = run / "hosts.sh"
        script.write_text("\n".join(["#!/bin/sh", *(f"echo {host}:1" for host in HOSTS)]) + "\n")
        script.chmod(0o755)
        return started(WORKER, run, model, under=launcher(script))

    return kill_some(start, folder, kills, replaces=False)


def launcher(script: Path) -> list[str]:
    """Return the words between `python` and `-m WORKER`: horovodrun, and the Python of the workers."""
    limits = [f"--num-proc={WORKERS}", "--min-num-proc=2", f"--max-num-proc={WORKERS}"]
    where = [f"--host-discovery-script={script}", "--network-interfaces=lo", "--gloo"]
    return ["-m", "horovod.runner.launch", *limits, *where, sys.executable]


def work(folder: Path, model: str) -> None:
    """Run one worker until it is killed. It commits every step, so that none is repeated."""
    import horovod.torch as hvd

    hvd.init()
    mine = training(model, hvd.rank())
    optimizer = hvd.DistributedOptimizer(mine.optimizer, named_parameters=mine.model.named_parameters())
    state = hvd.elastic.TorchState(mine.model, optimizer, step=0)

    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            optimizer.zero_grad()
            loss = mine.loss(mine.model, mine.batch)
            loss.backward()
            optimizer.step()
            loss.item()
            log.finished(state.step)
            state.step += 1
            state.commit()

    with Log(folder) as log:
        hvd.elastic.run(train)(state)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
