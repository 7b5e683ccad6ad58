"""The folder in which a trainer of Transformers travels to the workers: see `bring.parcel`.

trainer.pkl          the trainer, without its model and data
tokenizer.json, ...  of the processing class
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raytrain_plus.bring.parcel import read_pickle, write_data, write_model, write_pickle

TRAINER = "trainer.pkl"


def write_parcel(folder: Path, trainer: Any, model: torch.nn.Module | None, train: Any, held_out: Any) -> None:
    """Write the folder.

    `model`: None if the trainer builds it. `held_out`: None for none. Raises `InputError` for what cannot be pickled.
    """
    write_data(folder, trainer.args.to_dict(), train, held_out)
    write_pickle(folder / TRAINER, trainer, "the trainer, which holds what its constructor and its class keep")
    if model is not None:
        write_model(folder, model)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def read_trainer(folder: Path) -> Any:
    """Return the trainer, which has no model yet."""
    return read_pickle(folder / TRAINER)
