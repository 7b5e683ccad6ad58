"""`SFTTrainer` of TRL, whose `train` is a run.

from raytrain_plus.bring.trl import SFTTrainer     # in place of `from trl import SFTTrainer`
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import trl

from raytrain_plus.bring.transformers import TrainsAsRun
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job


class SFTTrainer(TrainsAsRun, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer`, whose `train` is a run."""

    def _job(self, trainer: Any, resumes: bool = False) -> tuple[Job, Path]:
        """See `TrainsAsRun`. Raises `InputError` also for what only TRL's own steps do."""
        refused = {
            "padding_free=True, or packing with the strategy 'bfd',": (
                self.padding_free,
                "packing_strategy='wrapped', or neither: a batch has a row for each row of the dataset",
            ),
            "activation_offloading=True": (self.args.activation_offloading, "gradient_checkpointing=True"),
        }
        for what, (given, remedy) in refused.items():
            if given:
                raise InputError(f"{what} is not offered", where="SFTConfig", remedy=remedy)
        return super()._job(trainer, resumes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `TrainsAsRun`. What TRL notes of each batch is not kept: nothing in a worker would empty it."""
        super().__setstate__(state)
        self._metrics: Any = {mode: defaultdict(partial(deque[float], maxlen=0)) for mode in ("train", "eval")}
        # The auxiliary loss of a batch is the mean of that batch; Trainer divides it for a sum.
        self.current_gradient_accumulation_steps = 1
