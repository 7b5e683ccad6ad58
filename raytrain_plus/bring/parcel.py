"""What travels from a script to the workers: a folder beside the run.

    model.pt             the model, as torch pickles it
    train.pkl, held_out.pkl
    NAME.py              returns the datasets: `data.dataset` names its functions
    *.pkl                what else the task needs
    arguments.json       the script's arguments, for a run that is resumed

Each new run has a folder of its own, so that an earlier one can still be exported. Only its own writer's pickles are
opened: whoever can write here can run code in the run anyway.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from raytrain_plus.errors import InputError, first_line

ARGUMENTS = "arguments.json"
DYNAMIC = ("evaluate_modules", "transformers_modules")
"""Packages that Hugging Face's libraries make in their cache: other machines do not have them."""
MODEL = "model.pt"
TRAIN, HELD_OUT = "train", "held_out"
_MODULE = '''"""The datasets of a script, written by `raytrain_plus.bring`."""

from pathlib import Path

import cloudpickle


def train():
    return cloudpickle.loads(Path(__file__).with_name("train.pkl").read_bytes())


def held_out():
    return cloudpickle.loads(Path(__file__).with_name("held_out.pkl").read_bytes())
'''


def new_parcel(above: Path) -> Path:
    """Return the folder of the next run, which does not exist yet."""
    numbers = [int(one.name) for one in above.glob("*") if one.name.isdecimal()]
    return above / str(max(numbers, default=0) + 1)


def check_same(folder: Path, arguments: Mapping[str, Any], where: str, new: str) -> None:
    """Raise `InputError` if a run that is resumed was begun with other arguments than these.

    `where`: what has the arguments. `new`: the call that begins a new run.
    """
    try:
        before = json.loads((folder / ARGUMENTS).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"the script's part of this run cannot be read: {first_line(error)}",
            where=str(folder),
            remedy=f"{new} begins a new run",
        ) from None
    now = json.loads(_text(arguments))
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise InputError(
            f"the run was begun with {changed[0]}={before.get(changed[0])!r}, and this is {now[changed[0]]!r}",
            where=where,
            remedy=f"resume with the same arguments, or begin a new run with {new}",
        )


def _text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, default=str, sort_keys=True)


def write_data(folder: Path, arguments: Mapping[str, Any], train: Any, held_out: Any) -> None:
    """Make the folder, with the arguments and the datasets. `held_out`: None for none.

    Raises `InputError` for what cannot be pickled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARGUMENTS).write_text(_text(arguments))
    write_pickle(folder / f"{TRAIN}.pkl", train, "the training dataset")
    if held_out is not None:
        write_pickle(folder / f"{HELD_OUT}.pkl", held_out, "the held-out dataset")
    (folder / f"{module_of(folder)}.py").write_text(_MODULE)


def module_of(folder: Path) -> str:
    """Return the name of the module of the datasets; those of two runs of one process differ."""
    return f"trainer_data_{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]}"


def write_model(folder: Path, model: torch.nn.Module) -> None:
    """Write the model into the folder. Raises `InputError` if it cannot be pickled."""
    try:
        with _dynamic_by_value():
            torch.save(model, folder / MODEL, pickle_module=cloudpickle)
    except Exception as error:
        raise _unpicklable("the model", error) from error


def read_parcel_model(folder: Path, device: torch.device) -> torch.nn.Module:
    """Return the model; on the meta device it has no values."""
    found: torch.nn.Module = torch.load(folder / MODEL, map_location=device, weights_only=False)
    return found


def write_pickle(file: Path, value: Any, what: str) -> None:
    """Pickle a value with the code of the script. Raises `InputError`, which names `what` it is, if it cannot be."""
    try:
        with _dynamic_by_value():
            file.write_bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise _unpicklable(what, error) from error


def read_pickle(file: Path) -> Any:
    """Return what `write_pickle` has written."""
    return cloudpickle.loads(file.read_bytes())


@contextmanager
def _dynamic_by_value() -> Iterator[None]:
    """Pickle the code of modules that only this machine has, not their names."""
    found = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] in DYNAMIC]
    for module in found:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in found:
            cloudpickle.unregister_pickle_by_value(module)


def _unpicklable(what: str, error: Exception) -> InputError:
    return InputError(
        f"{what} cannot be pickled, and so cannot travel to the workers: {type(error).__name__}: {first_line(error)}",
        where="Trainer",
        remedy="keep open files, connections and locks out of it, or make them when they are first used",
    )
