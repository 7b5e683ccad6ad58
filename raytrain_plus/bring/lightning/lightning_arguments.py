"""What the arguments of `lightning.Trainer` are as settings of a job. Pure.

What a run does not have is refused, with a remedy, or listed as ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import InputError

WHERE = "Trainer"
_WORKERS = "run={'workers': {'min': 1, 'max': 4}}"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "barebones": ((False,), "leave it out"),
    "detect_anomaly": ((False,), "leave it out: a loss or gradient that is not finite ends the run, and is named"),
    "devices": (("auto", 1), _WORKERS),
    "limit_train_batches": ((None, 1.0), "train on a torch.utils.data.Subset"),
    "max_time": ((None,), "stop the run with raytrain stop; it can be resumed"),
    "min_epochs": ((None,), "leave it out"),
    "min_steps": ((None,), "leave it out"),
    "model_registry": ((None,), "export the run with --format lightning, and register that file"),
    "num_nodes": ((1,), _WORKERS),
    "overfit_batches": ((0, 0.0), "train on a torch.utils.data.Subset"),
    "plugins": ((None, []), "leave it out"),
    "profiler": ((None,), "run={'profile': {'steps': [10, 20]}}"),
    "reload_dataloaders_every_n_epochs": ((0,), "leave it out: rows must be the same whenever they are read"),
    "strategy": (("auto",), f"{_WORKERS}; run={{'parallel': {{'sharded': 'optimizer'}}}} divides the state"),
}
"""Arguments that are refused unless they have one of these values: name -> the values, and the remedy."""
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "benchmark": (None,),
    "deterministic": (None, True),
    "enable_autolog_hparams": (True,),
    "enable_checkpointing": (None, True),
    "enable_model_summary": (None, True, False),
    "enable_progress_bar": (None, True, False),
    "inference_mode": (True, False),
    "log_every_n_steps": (None,),
    "num_sanity_val_steps": (None, 0),
    "sync_batchnorm": (False,),
    "use_distributed_sampler": (True,),
}
"""Arguments that a run has no use for: name -> the values of which nothing is said."""
MAPPED: Mapping[str, Any] = {
    "accelerator": "auto",
    "accumulate_grad_batches": 1,
    "callbacks": None,
    "check_val_every_n_epoch": 1,
    "default_root_dir": None,
    "fast_dev_run": False,
    "gradient_clip_algorithm": None,
    "gradient_clip_val": None,
    "limit_predict_batches": None,
    "limit_test_batches": None,
    "limit_val_batches": None,
    "logger": None,
    "max_epochs": None,
    "max_steps": -1,
    "precision": None,
    "val_check_interval": None,
}
"""The other arguments -> their defaults."""
PRECISIONS = {
    None: "fp32",
    "32-true": "fp32",
    "32": "fp32",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    "bf16-true": "bf16-params",
}


def read_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a run uses, with their defaults. Raises `InputError` for what it does not have."""
    for name, value in given.items():
        if name in REFUSED:
            allowed, remedy = REFUSED[name]
            if not any(type(value) is type(one) and value == one for one in allowed):
                raise InputError(f"{name}={value!r} is not offered", where=WHERE, remedy=remedy)
        elif name not in IGNORED and name not in MAPPED:
            raise InputError(f"Trainer has no argument {name!r}", where=WHERE)
    return {**MAPPED, **{name: value for name, value in given.items() if name in MAPPED}}


def ignored_arguments(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments that have values, and that a run ignores."""
    return [name for name, plain in IGNORED.items() if name in given and given[name] not in plain]


def settings_of_trainer(
    args: Mapping[str, Any], workers: int, rows: int | None, loader_batch: int, batch_size: int | None, evaluates: bool
) -> dict[str, Any]:
    """Return the settings of a job that follow from the arguments, without its task, data and callbacks.

    `workers`: the declared number, of which the batch is made. `rows`: those of the training set, if they are known.
    `loader_batch`: the batch size of its loader. `batch_size`: that of the run, if it is given. `evaluates`: whether
    there are held-out rows. Raises `InputError` for values that a run does not have.
    """
    accumulated = args["accumulate_grad_batches"]
    batch = batch_size or loader_batch * accumulated * workers
    epoch = None if rows is None else math.ceil(rows / batch)
    found: dict[str, Any] = {
        "data": {"batch_size": batch, "shards": accumulated * workers},
        "precision": _precision(args["precision"]),
        **_length(args),
    }
    if args["gradient_clip_val"]:
        found[_clipping(args["gradient_clip_algorithm"])] = float(args["gradient_clip_val"])
    if evaluates and args["limit_val_batches"] not in (0, 0.0):
        total = found.get("steps")
        every = _between_evaluations(args, accumulated, epoch)
        found["evaluate"] = {"every_steps": every if total is None else min(every, total)}
    return found


def held_out_rows(args: Mapping[str, Any], rows: int | None, batch_size: int) -> int | None:
    """Return how many of the held-out rows are used; None for all."""
    limit = int(args["fast_dev_run"]) or args["limit_val_batches"]
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if rows is None:
        raise InputError(
            "limit_val_batches of a dataset without a length", where=WHERE, remedy="give a dataset with __len__"
        )
    batches = math.ceil(rows / batch_size)
    return min(rows, batch_size * (int(batches * limit) if isinstance(limit, float) else limit))


def epoch_steps(rows: int | None, batch_size: int, what: str) -> int:
    """Return the steps of an epoch. `what`: the argument that needs it. Raises `InputError` without a known length."""
    if rows is None:
        raise InputError(
            f"{what} counts epochs of a dataset without a length", where=WHERE, remedy="count steps in place of epochs"
        )
    return math.ceil(rows / batch_size)


def _length(args: Mapping[str, Any]) -> dict[str, int]:
    steps, epochs = args["max_steps"], args["max_epochs"]
    if args["fast_dev_run"]:
        return {"steps": int(args["fast_dev_run"])}
    if steps != -1 and epochs is None:
        return {"steps": steps}
    if steps != -1:
        raise InputError("both max_epochs and max_steps are given", where=WHERE, expected="one of them")
    if epochs is None or epochs < 1:
        raise InputError(
            f"max_epochs={epochs} gives the run no end", where=WHERE, expected="max_epochs or max_steps, 1 or more"
        )
    return {"epochs": epochs}


def _precision(given: Any) -> str:
    text = None if given is None else str(given)
    if text not in PRECISIONS:
        raise InputError(
            f"precision={given!r} is not offered",
            where=WHERE,
            expected=f"one of {', '.join(one for one in PRECISIONS if one)}",
        )
    return PRECISIONS[text]


def _clipping(algorithm: Any) -> str:
    names = {None: "clip_norm", "norm": "clip_norm", "value": "clip_value"}
    given = getattr(algorithm, "value", algorithm)
    if given not in names:
        raise InputError(f"gradient_clip_algorithm={algorithm!r}", where=WHERE, expected="'norm' or 'value'")
    return names[given]


def _between_evaluations(args: Mapping[str, Any], accumulated: int, epoch: int | None) -> int:
    """Return the steps between evaluations; the interval of Lightning counts batches of one device."""
    interval, epochs = args["val_check_interval"], args["check_val_every_n_epoch"]
    if interval is None or (isinstance(interval, float) and interval == 1.0):
        if epoch is None or epochs is None:
            raise InputError(
                "how long an epoch is is not known, and evaluations are at its end",
                where=WHERE,
                remedy="val_check_interval=100, which counts batches",
            )
        return epoch * int(epochs)
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        raise InputError(f"val_check_interval={interval!r} is not offered", where=WHERE, expected="batches, or a share")
    if isinstance(interval, float):
        if epoch is None:
            raise InputError("val_check_interval is a share of an epoch of unknown length", where=WHERE)
        return max(1, int(epoch * interval))
    return max(1, interval // accumulated)
