"""Export a trained model from a run: to a file that does not need this package, or into a model in memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors
import safetensors.torch
import torch
from torch import nn

from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.source import index
from raytrain_plus.data.transform_block import Rows, without_ids
from raytrain_plus.errors import DamagedError, InputError, first_line
from raytrain_plus.job.task_loader import build_task, load_user_code
from raytrain_plus.runs.folder import job_of
from raytrain_plus.runs.history import load_history
from raytrain_plus.state.checkpoint import read_tensors
from raytrain_plus.state.finite import not_finite
from raytrain_plus.state.manifest import Manifest
from raytrain_plus.state.transfer import unpacked
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import is_address
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.open import open_folder
from raytrain_plus.torch_compat import pytree
from raytrain_plus.training.model import build_model
from raytrain_plus.training.randomness import random_key, set_random_key

Weights = Mapping[str, torch.Tensor]
CPU = torch.device("cpu")
_TREE = has.object_of(persistent=has.list_of(has.text))


def load(path: str | Path, model: nn.Module) -> int:
    """Load the newest weights and persistent buffers of a run, or of a safetensors file, into `model`, in place.

    `path` is the path or address of a run's folder, or the path of a safetensors file. Returns the step of the weights;
    -1 for a file. Raises `InputError` if there are none or they do not match `model`, which is then left unchanged.
    """
    if not is_address(path) and Path(path).is_file():
        step, weights, where = -1, _from_file(Path(path)), str(path)
    else:
        run = open_folder(path)
        manifest, weights = newest_weights(run)
        step, where = manifest.step, run.where
    put_weights(weights, model, where)
    return step


def newest_weights(run: Folder) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return the newest complete checkpoint of a run, and the model's tensors by their names in the `state_dict`.

    Damaged checkpoints are skipped with a warning on stderr. Raises `InputError` if there is no complete checkpoint, or
    a still newer one was written by a newer version of this package.
    """
    damages = []

    def passed_over(name: str, why: str) -> None:
        damages.append(f"{name}: {why}")
        print(f"warning: the checkpoint {name} cannot be used: {why}", file=sys.stderr)

    for found in load_history(run).found:
        if found.error is not None and not isinstance(found.error, DamagedError):
            raise found.error
        manifest = found.manifest
        if manifest is None:
            if found.damaged:
                passed_over(found.name, found.why)
            continue
        if wrong := _TREE(manifest.tree):
            passed_over(found.name, f"invalid manifest: {wrong}")
            continue
        buffers = set(manifest.tree["persistent"])
        names = [
            name
            for name in manifest.tensors
            if name.startswith("param/") or (name.startswith("buffer/") and name.partition("/")[2] in buffers)
        ]
        try:
            tensors = read_tensors(run, manifest, dict.fromkeys(names))
        except DamagedError as error:
            passed_over(found.name, f"{error.where}: {error.what}")
            continue
        weights = {name.partition("/")[2]: unpacked(packed, CPU) for name, packed in tensors.items()}
        trained = {name for group in manifest.tree.get("groups") or () for name in group["parameters"]}
        bad = not_finite((name, value) for name, value in weights.items() if name in trained)
        if bad:
            # Older versions wrote such checkpoints.
            passed_over(found.name, f"'{bad[0]}' holds NaN or infinity")
            continue
        return manifest, weights
    raise InputError(
        "no complete checkpoint" + "".join(f"; {damage}" for damage in damages),
        where=run.where,
        expected="the folder of a run with a complete checkpoint",
        remedy="list the run's checkpoints with: raytrain status RUN",
    )


def _from_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"not a valid safetensors file: {error}", where=str(file)) from None


def put_weights(weights: Weights, model: nn.Module, where: str) -> None:
    """Copy tensors into a model by name; for tied tensors one name is enough.

    Raises `InputError` if names or shapes do not match; the model is then unchanged.
    """
    mine = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = {}
    for name, value in mine.items():
        aliases.setdefault(id(value), []).append(name)
    given = {alias for name in weights for alias in (aliases[id(mine[name])] if name in mine else [name])}
    wrong = [f"{name} is not in the model" for name in sorted(given - mine.keys())]
    wrong += [f"{name} is only in the model" for name in sorted(mine.keys() - given)]
    wrong += [
        f"{name} is {list(value.shape)}, {list(mine[name].shape)} in the model"
        for name, value in weights.items()
        if name in mine and value.shape != mine[name].shape
    ]
    if wrong:
        raise InputError(
            f"the weights do not match the model: {'; '.join(wrong[:3])}" + "; ..." * (len(wrong) > 3), where=where
        )
    with torch.no_grad():
        for name, value in weights.items():
            mine[name].copy_(value)


def export_weights(run: Folder, to: Path) -> Manifest:
    """Write the newest weights of a run to a safetensors file; return the manifest of their checkpoint."""
    manifest, weights = newest_weights(run)
    _whole(to, lambda part: safetensors.torch.save_file(weights, part, metadata={"format": "pt"}))
    return manifest


def export_program(run: Folder, to: Path, roots: Sequence[Path]) -> Manifest:
    """Write the newest model of a run as a `torch.export` program, which runs without the task's code.

    The example inputs are those with which the task calls the model for a batch of step 0. Returns the manifest of the
    checkpoint. Raises `InputError` if torch cannot export the model.
    """
    job = job_of(run)
    assert isinstance(job.task, str)
    manifest, weights = newest_weights(run)
    code = load_user_code(job, roots)
    set_random_key(random_key(job.seed, "task"))
    task = build_task(code.task, job.args)
    module = build_model(task, job.seed, CPU).module
    put_weights(weights, module, run.where)
    module.eval()
    seen = index(job.data.path)
    sample_order = sample_order_of(job, seen)
    rows = Rows(
        index=seen, sample_order=sample_order, seed=job.seed, transform=code.transform, block_rows=job.data.granule
    )
    batch = task.collate(pa.concat_tables([without_ids(rows.read(one)) for one in sample_order.row_ranges(0, 0)]))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        task.loss(module, batch)
    hook.remove()
    if not calls:
        what = "the task never calls its model as a whole"
        raise InputError(what, where=f"task: {job.task}", remedy="--format safetensors")
    args, kwargs = calls[0]
    try:
        shapes = torch.export.ShapesCollection()
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.dim():
                # Allow any number of rows if the model supports it.
                shapes[value] = {0: torch.export.Dim.AUTO}
        dynamic = shapes.dynamic_shapes(module, args, kwargs)
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
    except Exception as error:
        raise InputError(
            f"torch.export failed for this model: {type(error).__name__}: {first_line(error)}",
            where=f"task: {job.task}",
            remedy="--format safetensors",
        ) from error
    _whole(to, lambda part: torch.export.save(program, part))
    return manifest


def _whole(to: Path, write: Any) -> None:
    """Write a file under a temporary name, then rename it. Raises `InputError` if it cannot be written."""
    part = to.with_name(f".{to.stem}.part{to.suffix}")
    try:
        write(part)
        os.replace(part, to)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"the file cannot be written: {error}", where=str(to)) from None
    finally:
        part.unlink(missing_ok=True)
