"""Ray Train: when one worker dies, all are restarted from the newest checkpoint. As a module: the driver."""

from __future__ import annotations

import itertools
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers.model import (
    CHECKPOINT_EVERY,
    WORKERS,
    Log,
    kill_some,
    path_of_modules,
    save,
    started,
    training,
)

DRIVER = "tests.benchmarks.peers.ray_train"
SETTINGS = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}


def measure(folder: Path, kills: int, *, model: str = "byte_gpt") -> list[Incident]:
    """Kill `kills` workers, one after the other, in runs under `folder`."""

    def start(run: Path) -> AbstractContextManager[object]:
        return started(DRIVER, run, model, settings=SETTINGS)

    return kill_some(start, folder, kills, replaces=True)


def drive(folder: Path, model: str) -> None:
    """Train on its own Ray until it is ended."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    environment = {"PYTHONPATH": path_of_modules(), "OMP_NUM_THREADS": "1", **SETTINGS}
    ray.init(address="local", num_cpus=2 * WORKERS, include_dashboard=False, runtime_env={"env_vars": environment})
    TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "model": model},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="peer",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def work(config: dict[str, Any]) -> None:
    """Run one worker until it is killed."""
    from ray import train
    from ray.train.torch import prepare_model

    rank = train.get_context().get_world_rank()
    mine = training(config["model"], rank)
    first = 0
    newest = train.get_checkpoint()
    if newest is not None:
        with newest.as_directory() as kept:
            state = torch.load(Path(kept) / "checkpoint.pt")
        mine.model.load_state_dict(state["model"])
        mine.optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    parallel = prepare_model(mine.model)
    with Log(Path(config["folder"])) as log, tempfile.TemporaryDirectory() as made:
        for step in itertools.count(first):
            mine.optimizer.zero_grad()
            loss = mine.loss(parallel, mine.batch)
            loss.backward()
            mine.optimizer.step()
            loss.item()
            log.finished(step)
            if (step + 1) % CHECKPOINT_EVERY == 0:
                checkpoint = None
                if rank == 0:
                    state = {"model": mine.model.state_dict(), "optimizer": mine.optimizer.state_dict(), "step": step}
                    save(Path(made) / "checkpoint.pt", state)
                    checkpoint = train.Checkpoint.from_directory(made)
                train.report({}, checkpoint=checkpoint)


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2])
