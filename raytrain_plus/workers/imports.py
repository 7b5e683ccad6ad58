"""Import a worker's modules in advance. This module itself imports neither torch nor Ray."""

from __future__ import annotations

import contextlib
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrain_plus.workers.messages import Plan


@dataclass(frozen=True, slots=True)
class Imports:
    """The modules that a worker of a job loads."""

    modules: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    """Folders to put in front of `sys.path`, unless they are already in it."""


def imports_of(plan: Plan) -> Imports:
    """Return the modules that a worker with that plan loads, in order."""
    job = plan.job
    # A worker, which also imports this module, has not loaded it yet.
    from raytrain_plus.data.of_job import keeps_rows
    from raytrain_plus.data.sources.parquet_source import on_a_disk

    modules = ["raytrain_plus.workers.worker"]
    if not (keeps_rows(job, plan.data) and on_a_disk(plan.data)):
        # What is kept and near is read without Ray Data, unless steps wait for it.
        modules.append("raytrain_plus.data.reading.stream")
    if plan.collective == "horovod":
        modules.insert(0, "horovod.torch")
    if job.parallel.pipeline > 1:
        modules.append("raytrain_plus.parallel.pipeline.schedule")
    named = [job.task if plan.pickled_task is None else None, job.data.transform, job.data.collate]
    modules += [name.partition(":")[0] for name in named if isinstance(name, str)]
    return Imports(tuple(modules), plan.roots)


def import_all(imports: Imports) -> None:
    """Import these modules, so that this process can become a worker at once.

    A module that cannot be imported is left out: the worker that needs it reports that.
    """
    sys.path[:0] = [root for root in imports.roots if root not in sys.path]
    for module in imports.modules:
        with contextlib.suppress(BaseException):
            importlib.import_module(module)
    from torch import nn, optim

    # The first optimizer of a process loads most of torch's compiler.
    optim.SGD(nn.Linear(1, 1).parameters())
