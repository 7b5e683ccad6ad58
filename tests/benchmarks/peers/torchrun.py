"""torchrun: when one worker dies, all are restarted from the newest checkpoint. As a module: a worker."""

from __future__ import annotations

import itertools
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers.model import CHECKPOINT_EVERY, WORKERS, Log, kill_some, save, started, training

WORKER = "tests.benchmarks.peers.torchrun"
LAUNCHER = (
    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"),
    *("--max-restarts=1000", "--monitor-interval=0.1"),
)
# By default torch 2.13 gives restarted workers the store of those before them, addresses of the dead included: Gloo
# then fails to connect, again and again (pytorch#135712).
SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def measure(folder: Path, kills: int, *, model: str = "byte_gpt") -> list[Incident]:
    """Kill `kills` workers, one after the other, in runs under `folder`."""

    def start(run: Path) -> AbstractContextManager[object]:
        return started(WORKER, run, model, under=LAUNCHER, settings=SETTINGS)

    return kill_some(start, folder, kills, replaces=True)


def work(folder: Path, model: str) -> None:
    """Run one worker until it is killed."""
    dist.init_process_group("gloo")
    mine = training(model, dist.get_rank())
    first = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        mine.model.load_state_dict(state["model"])
        mine.optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    parallel = DistributedDataParallel(mine.model)
    with Log(folder) as log:
        for step in itertools.count(first):
            mine.optimizer.zero_grad()
            loss = mine.loss(parallel, mine.batch)
            loss.backward()
            mine.optimizer.step()
            loss.item()
            log.finished(step)
            if (step + 1) % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": mine.model.state_dict(), "optimizer": mine.optimizer.state_dict(), "step": step}
                save(checkpoint, state)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
