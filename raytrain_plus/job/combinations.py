"""Which settings combine, as a table for `jobs/parallel.md`, from the checks of a job's values.

As a module: prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_plus.errors import JobError
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import EarlyStop, Elastic, Ema, Evaluate, Job, Parallel, Workers

_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "`precision: tf32`": {"precision": "tf32", "workers": Workers(min=4, gpus=1)},
    "`precision: bf16`": {"precision": "bf16"},
    "`precision: fp16`": {"precision": "fp16"},
    "`precision: bf16-params`": {"precision": "bf16-params"},
    "`recompute: selective`, `full`, layers": {"recompute": "full"},
    "`compile: true`": {"compile": True},
    "`compile: true` with `recompute`": {"compile": True, "recompute": "selective"},
    "`compression: fp16`, `bf16`": {"compression": "bf16"},
    "`clip_value`": {"clip_value": 1.0},
    "`clip_norm`": {"clip_norm": 1.0},
    "`offload: optimizer`": {"offload": "optimizer"},
    "`ema`": {"ema": Ema(decay=0.9)},
    "`early_stop`": {
        "early_stop": EarlyStop(metric="loss", patience=3),
        "evaluate": Evaluate(path="held_out", every_steps=10),
    },
    "`elastic.on_nonfinite: skip`": {"elastic": Elastic(on_nonfinite="skip")},
    "`data.on_error: skip`": {"data": Data(path="rows", batch_size=8, shards=4, on_error="skip")},
}
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "one stage": {},
    "exact": {"reduction": "exact"},
    "1f1b, gpipe": {"parallel": Parallel(pipeline=2)},
    "interleaved": {"parallel": Parallel(pipeline=2, schedule="interleaved")},
    "zero-bubble": {"parallel": Parallel(pipeline=2, schedule="zero-bubble")},
    "pipedream": {"parallel": Parallel(pipeline=2, schedule="pipedream")},
    "exact, 1f1b": {"reduction": "exact", "parallel": Parallel(pipeline=2)},
    "tensor slices": {"parallel": Parallel(tensor=2)},
    "slices of experts": {"parallel": Parallel(experts=2)},
    "sharded: optimizer": {"parallel": Parallel(sharded="optimizer")},
    "sharded: optimizer, 1f1b": {"parallel": Parallel(sharded="optimizer", pipeline=2)},
    "sharded: full": {"parallel": Parallel(sharded="full")},
}


def table() -> str:
    """Return Markdown: for each setting and way to sum and to divide the model, yes or the number of a reason."""
    reasons: list[str] = []
    rows = [[name, *(_cell(setting, way, reasons) for way in _WAYS.values())] for name, setting in _SETTINGS.items()]
    lines = [_line(["", *_WAYS]), _line(["---"] * (len(_WAYS) + 1)), *map(_line, rows), ""]
    return "\n".join([*lines, *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""])


def _cell(setting: Mapping[str, Any], way: Mapping[str, Any], reasons: list[str]) -> str:
    """Return whether a job may have both; `reasons` collects why not."""
    why = refused({**way, **setting})
    if why and why not in reasons:
        reasons.append(why)
    return f"no ({reasons.index(why) + 1})" if why else "yes"


def refused(settings: Mapping[str, Any]) -> str:
    """Return why a job with these settings is refused; empty if it is not."""
    base: dict[str, Any] = {
        "name": "job",
        "task": "module:Task",
        "data": Data(path="rows", batch_size=8, shards=4),
        "steps": 100,
        "workers": Workers(min=4),
    }
    try:
        Job(**{**base, **settings})
    except JobError as error:
        return str(error.problems[0].what)
    return ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table())
