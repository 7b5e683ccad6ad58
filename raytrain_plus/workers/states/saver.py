"""Write a worker's shares of checkpoints on a thread, one at a time, while the training continues."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from raytrain_plus.errors import RaytrainError, StorageError, TrainingError, WaitExpired
from raytrain_plus.state.finite import check_finite, tensor_of
from raytrain_plus.state.holding import Holding, listed_weights
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.stored.checkpoint import Copy, write_share
from raytrain_plus.state.stored.manifest import Share, name_of
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outage, outage_of
from raytrain_plus.storage.retry import retry
from raytrain_plus.workers.messages import ShareOf, Written

STILL_S = 300.0
"""Seconds without progress after which a share is given up."""
LOOK_S = 1.0
"""Seconds between two looks at an earlier share that the last one of a run waits for."""
CHECK_S = 0.01
"""Seconds between two checks while training waits for a checkpoint."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker writes of the checkpoints of one generation, and the function that reports it."""

    of: ShareOf
    tell: Callable[[Written], None]


class Saver:
    """Implements `training.step.loop.CheckpointWriter`."""

    def __init__(
        self,
        run: Folder,
        holding: Callable[[], Holding],
        every_steps: int | None,
        best: bool,
    ) -> None:
        """Save into this folder.

        `best`: whether every evaluated state is saved, so that the best one is kept.
        """
        self._run = run
        self._holding = holding
        self._every_steps = every_steps
        self._best = best
        self._memory = HostMemory()
        # One thread writes; while the storage holds it up, the other reports that.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint")
        self._free = threading.Event()
        self._free.set()
        self._progress = 0.0
        self._taken = self._total = 0
        """Bytes of the share being written that the storage has taken, and all of its bytes."""
        self._late: Callable[[], None] | None = None
        self._open: tuple[int, int] | None = None
        """Step and generation of the checkpoint whose end has not been reported yet."""
        self._settled = threading.Event()
        self._written: Written | None = None
        self._part: Part | None = None
        self._unfit: TrainingError | None = None
        self.copied = -1
        """The last step that was copied in the current generation."""

    @property
    def generation(self) -> int:
        """The number of the generation that it writes for, as in the names of checkpoints."""
        return -1 if self._part is None else self._part.of.generation

    def begin(self, part: Part) -> None:
        """Write this part from now on."""
        self._part, self.copied = part, -1

    def settled(self, step: int, generation: int) -> None:
        """Record that a checkpoint is complete, or will never be."""
        if self._open == (step, generation):
            self._open = self._written = None
            self._settled.set()

    @property
    def written(self) -> Written | None:
        """What was reported of a share, if the end of its checkpoint was not."""
        return self._written

    def busy(self) -> bool:
        """Return whether an earlier checkpoint is in progress.

        Then this worker or another still writes its share, or the manifest is being written. If its end is never
        reported, it counts as in progress no longer than a storage may stall (`STILL_S`).
        """
        still_s = time.monotonic() - self._progress
        if self._free.is_set():
            return self._open is not None and still_s <= STILL_S
        late = self._late
        if late is not None and still_s > STILL_S:
            self._late = None
            self._threads.submit(late)
        return True

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until no checkpoint is in progress; `check` is called meanwhile, and may raise."""
        while self.busy():
            check()
            (self._settled if self._free.is_set() else self._free).wait(CHECK_S)

    def writing(self) -> tuple[int, int] | None:
        """Return how many bytes of the share being written the storage has taken, and of how many; None without one."""
        return None if self._free.is_set() else (self._taken, self._total)

    def check(self) -> None:
        """Raise `TrainingError` if a state to be saved is not finite."""
        if self._unfit is not None:
            raise self._unfit

    def due(self, step: int, evaluated: bool) -> bool:
        """Return whether the state after `step` should be saved; the same for every member."""
        by_steps = self._every_steps is not None and (step + 1) % self._every_steps == 0
        return by_steps or (self._best and evaluated)

    def copy(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copy this worker's share of the state after `step`, with those metrics, and write it in the background."""
        part = self._part
        assert part is not None
        # During training, no state comes here before an earlier share is written.
        while not self._free.wait(LOOK_S):
            if time.monotonic() - self._progress > STILL_S:
                raise WaitExpired(f"of an earlier checkpoint nothing was written for {STILL_S:g} s")
        began, start = time.time(), time.monotonic()
        holding = self._holding()
        copies, tree = self._memory.copy(holding, part.of.writer, part.of.holders_of, part.of.rows)
        weights = listed_weights(holding)
        stall_s = time.monotonic() - start
        self._free.clear()
        self._settled.clear()
        self._open, self._written = (step, part.of.generation), None
        self.copied = step

        def told(share: Share | None, error: str, outage: Outage | None = None) -> Written:
            return Written(
                step=step,
                generation=part.of.generation,
                writer=part.of.writer,
                writers=part.of.writers,
                share=share,
                tree=part.of.own_tree(tree),
                weights=weights,
                metrics=dict(metrics),
                time=began,
                stall_s=stall_s,
                error=error,
                outage=outage,
            )

        what = f"{self._run.where} has accepted no data of it for {STILL_S:g} s"
        self._total = sum(copy.data.nbytes for copy in copies)
        self._moved(0)
        self._late = lambda: self._tell(part, told(None, what))
        self._threads.submit(self._write, part, step, copies, holding.allowed, told)

    def _tell(self, part: Part, written: Written) -> None:
        if self._open == (written.step, written.generation):
            self._written = written
        part.tell(written)

    def _moved(self, taken: int) -> None:
        self._taken, self._progress = taken, time.monotonic()

    def _write(
        self,
        part: Part,
        step: int,
        copies: Sequence[Copy],
        allowed: Collection[str],
        told: Callable[..., Written],
    ) -> None:
        run = self._run if part.of.claim is None else Claimed(self._run, part.of.claim)
        outages: list[Outage] = []

        def failed(error: OSError) -> None:
            # The next attempt begins at the first byte.
            self._taken = 0
            # The newest failure reports how much is free now.
            outages[:] = [outage_of(error, run, sum(copy.data.nbytes for copy in copies))]

        try:
            self._memory.wait()
            check_finite(((copy.piece.name, _tensor(copy)) for copy in copies), allowed, step)
            name = name_of(step, part.of.generation)
            share = retry(
                lambda: write_share(run, name, part.of.writer, part.of.writers, copies, self._moved), failed=failed
            )
            self._tell(part, told(share, ""))
        except TrainingError as failure:
            self._unfit = failure
            self._tell(part, told(None, str(failure)))
        except StorageError as failure:
            self._tell(part, told(None, str(failure), *outages))
        except RaytrainError as failure:
            self._tell(part, told(None, str(failure)))
        except Exception:
            self._tell(part, told(None, traceback.format_exc()))
        finally:
            self._late = None
            self._free.set()


def _tensor(copy: Copy) -> torch.Tensor:
    """Return the values of a piece; flat, unless the whole tensor is a scalar."""
    flat = tensor_of(copy.dtype, copy.data)
    return flat if copy.shape else flat.reshape(())
