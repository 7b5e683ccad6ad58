"""Tasks of the runs on a GPU that workers share: their losses are those of a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.byte_gpt import ByteGPT
from raytrain_plus.collective.nccl_peers import NcclPeers
from raytrain_plus.collective.nccl_world import NcclWorld
from tests.gpu import EACH
from tests.integration.tasks import FaultySlices

if os.environ.get("NCCL_HOSTID") == EACH:
    # An NCCL that needs a host of its own for each rank reads it when it is first used.
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"


@cache
def note_nccl(folder: str) -> None:
    """Leave a file `nccl-PID` in the folder once this process uses NCCL."""

    def noted(use: Callable[[Any], None]) -> Callable[[Any], None]:
        def noting(world: Any) -> None:
            use(world)
            (Path(folder) / f"nccl-{os.getpid()}").touch()

        return noting

    NcclWorld.use_formed = noted(NcclWorld.use_formed)  # type: ignore[method-assign]
    NcclPeers.use_formed = noted(NcclPeers.use_formed)  # type: ignore[method-assign]


class Alike(FaultySlices):
    """The same without dropout: a GPU draws other numbers than a CPU does."""

    def __init__(self, folder: str, fault: str = "", pad_s: float = 0.0) -> None:
        super().__init__(folder, fault, pad_s=pad_s)
        note_nccl(folder)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "drop": nn.Identity}


class Bytes(ByteGPT):
    """A small byte GPT, likewise without dropout; each of its passes takes `pad_s` seconds longer."""

    def __init__(self, folder: str, pad_s: float = 0.0) -> None:
        super().__init__(width=64, depth=4, heads=2, dropout=0.0)
        self.pad_s = pad_s
        note_nccl(folder)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self.pad_s)
        return super().loss(model, batch)
