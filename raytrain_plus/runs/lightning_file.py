"""Write a LightningModule as a file that `load_from_checkpoint` opens."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from raytrain_plus.errors import InputError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@runtime_checkable
class CountsEpochs(Protocol):
    """A task that knows how long an epoch is."""

    def epochs_after(self, steps: int) -> int:
        """Return the number of whole epochs in so many steps."""


def checkpoint_of(module: Any, steps: int, epoch: int) -> dict[str, Any]:
    """Return what a file of Lightning holds of a module: weights, hyperparameters, counts; no optimizer's state.

    `epoch`: the number of whole epochs. Raises `InputError` for what is no LightningModule.
    """
    bases = (one.__module__ for one in type(module).__mro__ if one.__name__ == "LightningModule")
    package = next((name for base in bases for name in PACKAGES if base.startswith(name)), None)
    if package is None:
        raise InputError(
            f"the model is a {type(module).__name__}, and only LightningModules can be written as such a file",
            where="--format lightning",
            remedy="--format safetensors",
        )
    found: dict[str, Any] = {
        "state_dict": module.state_dict(),
        "epoch": epoch,
        "global_step": steps,
        "pytorch-lightning_version": import_module(package).__version__,
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    if module.hparams:
        found["hyper_parameters"] = dict(module.hparams)
        if hasattr(module, "_hparams_name"):
            found["hparams_name"] = module._hparams_name  # noqa: SLF001
    module.on_save_checkpoint(found)
    return found
