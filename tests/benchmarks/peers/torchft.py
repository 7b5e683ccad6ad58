"""torchft: when one worker dies, the others continue; a new one copies their state. As a module: the driver, a worker.

Each worker is a replica group of one. The driver starts torchft's lighthouse and the workers, and restarts a worker
that has died, as torchrun would under each group. torchft is optional: measuring it needs `torchft==0.2.0`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers.model import REPOSITORY, START_S, WORKERS, Log, awaited, kill_some, started, training

DRIVER = "tests.benchmarks.peers.torchft"
JOIN_MS = 1000
"""how long the lighthouse waits for a worker that may be slow or dead"""


def measure(folder: Path, kills: int, *, model: str = "byte_gpt") -> list[Incident]:
    """Kills `kills` workers, one after the other, in runs under `folder`.

    The second, shorter stall, when the new worker joins, is not part of an incident's.
    """
    import_module("torchft")  # If it is missing, fail here.

    def start(run: Path) -> AbstractContextManager[object]:
        return started(DRIVER, run, "drive", model)

    return kill_some(start, folder, kills, replaces=True)


def drive(folder: Path, model: str) -> None:
    """Keep `WORKERS` workers running until it is ended."""
    address = folder / "lighthouse"
    spawn(folder, "lighthouse")
    if not awaited(address.exists, START_S):
        raise TimeoutError(f"torchft's lighthouse did not start in {START_S:.0f} s")
    replicas = {spawn(folder, model, str(number)): number for number in range(WORKERS)}
    while True:
        number = replicas.pop(os.wait()[0])
        replicas[spawn(folder, model, str(number))] = number


def spawn(folder: Path, *arguments: str) -> int:
    """Start a process of this module; return its pid."""
    return subprocess.Popen([sys.executable, "-m", DRIVER, str(folder), *arguments], cwd=REPOSITORY).pid


def light(folder: Path) -> None:
    """Run the lighthouse, which tells the workers which peers exist; its address is written last, atomically."""
    torchft: Any = import_module("torchft.coordination")
    server = torchft.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=JOIN_MS)
    unfinished = folder / "lighthouse.unfinished"
    unfinished.write_text(server.address())
    unfinished.rename(folder / "lighthouse")
    signal.pause()


def work(folder: Path, model: str, number: int) -> None:
    """Run worker `number` until it is killed."""
    torchft: Any = import_module("torchft")
    distributed: Any = import_module("torch.distributed")  # its annotations lack TCPStore
    mine = training(model, number)

    def state() -> dict[str, Any]:
        return {"model": mine.model.state_dict(), "optimizer": mine.optimizer.state_dict()}

    def take(state: dict[str, Any]) -> None:
        mine.model.load_state_dict(state["model"])
        mine.optimizer.load_state_dict(state["optimizer"])

    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=take,
        state_dict=state,
        replica_id=f"worker_{number}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=(folder / "lighthouse").read_text(),
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )
    with Log(folder) as log:
        while True:
            manager.start_quorum()
            mine.optimizer.zero_grad()
            loss = mine.loss(mine.model, mine.batch)
            loss.backward()
            gradients = [parameter.grad for parameter in mine.model.parameters() if parameter.grad is not None]
            # torchft's own DistributedDataParallel, in 0.2.0 with Gloo, fails an assertion in all survivors of a kill.
            averaged = parameters_to_vector(gradients)
            manager.allreduce(averaged).wait()
            vector_to_parameters(averaged, gradients)
            if manager.should_commit():
                mine.optimizer.step()
                loss.item()
                log.finished(manager.current_step() - 1)


def main(folder: str, role: str, *arguments: str) -> None:
    if role == "drive":
        drive(Path(folder), *arguments)
    elif role == "lighthouse":
        light(Path(folder))
    else:
        work(Path(folder), role, int(arguments[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
