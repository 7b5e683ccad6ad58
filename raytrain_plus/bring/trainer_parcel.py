"""What travels from a Trainer script to the workers: a folder beside the run.

    trainer.pkl          the trainer, without its model and data
    model.pt             the model, as torch pickles it
    train.pkl, held_out.pkl
    NAME.py              returns the datasets: `data.dataset` names its functions
    tokenizer.json, ...  of the processing class

Only its own writer's pickles are opened: whoever can write here can run code in the run anyway.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from raytrain_plus.errors import InputError, first_line

TRAINER = "trainer.pkl"
MODEL = "model.pt"
TRAIN, HELD_OUT = "train", "held_out"
_MODULE = '''"""The datasets of a Trainer script, written by `raytrain_plus.bring.transformers`."""

from pathlib import Path

import cloudpickle


def train():
    return cloudpickle.loads(Path(__file__).with_name("train.pkl").read_bytes())


def held_out():
    return cloudpickle.loads(Path(__file__).with_name("held_out.pkl").read_bytes())
'''


def write_parcel(folder: Path, trainer: Any, model: torch.nn.Module | None, train: Any, held_out: Any) -> str:
    """Write the folder anew; return the name of the module of the datasets.

    `model`: None if the trainer builds it. `held_out`: None for none. Raises `InputError` for what cannot be pickled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TRAINER, trainer, "the trainer, which holds what its constructor and its class keep")
    _write(folder / f"{TRAIN}.pkl", train, "train_dataset")
    if held_out is not None:
        _write(folder / f"{HELD_OUT}.pkl", held_out, "eval_dataset")
    if model is not None:
        try:
            torch.save(model, folder / MODEL, pickle_module=cloudpickle)
        except Exception as error:
            raise _unpicklable("the model", error) from error
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    # Modules of two runs of one process must differ in their names.
    module = f"trainer_data_{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]}"
    (folder / f"{module}.py").write_text(_MODULE)
    return module


def read_trainer(folder: Path) -> Any:
    """Return the trainer, which has no model yet."""
    return cloudpickle.loads((folder / TRAINER).read_bytes())


def read_parcel_model(folder: Path, device: torch.device) -> torch.nn.Module:
    """Return the model; on the meta device it has no values."""
    found: torch.nn.Module = torch.load(folder / MODEL, map_location=device, weights_only=False)
    return found


def _write(file: Path, value: Any, what: str) -> None:
    try:
        file.write_bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise _unpicklable(what, error) from error


def _unpicklable(what: str, error: Exception) -> InputError:
    return InputError(
        f"{what} cannot be pickled, and so cannot travel to the workers: {type(error).__name__}: {first_line(error)}",
        where="Trainer",
        remedy="keep open files, connections and locks out of it, or make them when they are first used",
    )
