"""What of a LightningModule a run calls, what it leaves out, and what it refuses. Pure.

Classes of Lightning are known by their names, so that nothing here imports it: the same module may be one of the
package `lightning` or of `pytorch_lightning`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from raytrain_plus.errors import TaskError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
REFUSED: Mapping[str, str] = {
    "all_gather": "leave it out: what a run reports are means over all rows",
    "backward": "leave it out: a run computes the gradients of what training_step returns",
    "clip_gradients": "Trainer(gradient_clip_val=...)",
    "configure_gradient_clipping": "Trainer(gradient_clip_val=..., gradient_clip_algorithm='norm' or 'value')",
    "configure_sharded_model": "define configure_model, and shard with run={'parallel': {'sharded': 'optimizer'}}",
    "log": "call self.log of Lightning",
    "log_dict": "call self.log_dict of Lightning",
    "lr_scheduler_step": "return a scheduler of torch.optim.lr_scheduler from configure_optimizers",
    "manual_backward": "leave it out: a run computes the gradients of what training_step returns",
    "on_after_backward": "register a hook of the parameter: value.register_hook(...)",
    "on_before_backward": "change the loss in training_step; run={'ema': {'decay': 0.999}} averages weights",
    "on_before_zero_grad": "leave it out; run={'ema': {'decay': 0.999}} averages weights",
    "on_validation_model_eval": "set modules to evaluation mode in __init__, which a run keeps",
    "on_validation_model_train": "set modules to evaluation mode in __init__, which a run keeps",
    "on_validation_model_zero_grad": "leave it out: an evaluation leaves gradients alone",
    "optimizer_step": "return an optimizer, and a scheduler for its rates, from configure_optimizers",
    "optimizer_zero_grad": "leave it out: gradients are zero before each step",
    "optimizers": "call self.optimizers of Lightning",
    "toggle_optimizer": "use one optimizer",
    "training_epoch_end": "define on_train_epoch_end, as Lightning 2 does",
    "training_step_end": "compute it in training_step, as Lightning 2 does",
    "untoggle_optimizer": "use one optimizer",
    "validation_epoch_end": "define on_validation_epoch_end, as Lightning 2 does",
    "validation_step_end": "compute it in validation_step, as Lightning 2 does",
}
"""Methods that a run would not call, and must not pass over -> what to do instead."""
PASSED_OVER: Mapping[str, str] = {
    "on_before_optimizer_step": "on_before_optimizer_step is not called; each step reports its grad_norm",
    "on_train_epoch_start": "what on_train_epoch_start logs is not reported; each step reports its rates",
    "on_train_epoch_end": "what on_train_epoch_end logs is not reported; log it in training_step with on_epoch=True",
}
"""Methods of which not everything is done -> what is not."""


def lightning_class(kind: type, name: str) -> type | None:
    """Return the class of Lightning with that name that `kind` is derived from; None if there is none."""
    found = (one for one in kind.__mro__ if one.__name__ == name and one.__module__.startswith(PACKAGES))
    return next(found, None)


def package_of(kind: type) -> str:
    """Return the package of Lightning that a class is derived from: `lightning.pytorch` or `pytorch_lightning`."""
    modules = (one.__module__ for one in kind.__mro__)
    return next(name for module in modules for name in PACKAGES if module.startswith(name))


def overrides(module: Any, name: str, base: str = "LightningModule") -> bool:
    """Return whether a module, or another object of Lightning's, has a method of its own."""
    plain = lightning_class(type(module), base)
    return name in vars(module) or getattr(type(module), name, None) is not getattr(plain, name, None)


def check_kind(module: Any, where: str) -> None:
    """Raise `TaskError` for what is no LightningModule."""
    if lightning_class(type(module), "LightningModule") is None:
        what = "a class" if isinstance(module, type) else f"of type {type(module).__name__}"
        raise TaskError(f"the module is {what}", where=where, expected="a LightningModule")


def check_module(module: nn.Module) -> None:
    """Raise `TaskError` for a module that trains in a way that a run does not have."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{kind} sets automatic_optimization = False, and a run makes the optimizer's steps itself",
            where="LightningModule",
            remedy="return the loss from training_step, or write a Task of raytrain_plus",
        )
    for name, remedy in REFUSED.items():
        if overrides(module, name):
            raise TaskError(
                f"{kind} overrides {name}, which a run does not call", where="LightningModule", remedy=remedy
            )
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
            raise TaskError(f"{kind} has no {name}", where="LightningModule", expected=f"a method {name}")
    taken = inspect.signature(module.training_step).parameters  # type: ignore[arg-type]
    for name in ("dataloader_iter", "optimizer_idx", "hiddens"):
        if name in taken:
            raise TaskError(
                f"{kind}.training_step takes {name}, which a run does not have",
                where="LightningModule",
                expected="training_step(self, batch, batch_idx)",
            )


def remarks_on(module: nn.Module) -> list[str]:
    """Return what of a module's methods is not done."""
    return [text for name, text in PASSED_OVER.items() if overrides(module, name)]


def call_step(step: Any, batch: Any, batch_idx: int) -> Any:
    """Return what `training_step` or `validation_step` returns; `batch_idx` is for those that take it."""
    taken = inspect.signature(step).parameters
    many = any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in taken.values())
    if "batch_idx" in taken or many or len(taken) > 1:
        return step(batch, batch_idx)
    return step(batch)
