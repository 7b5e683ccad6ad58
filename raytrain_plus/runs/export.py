"""Export a trained model from a run: to a file that does not need this package, or into a model in memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors
import safetensors.torch
import torch
from torch import nn

from raytrain_plus.data.dataset import both_data, training_data
from raytrain_plus.data.of_job import rows_of, sample_order_of
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import DamagedError, DataError, InputError, TaskError, WaitExpired, first_line
from raytrain_plus.generators import set_random_key
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import UserCode, as_task_error, load_user_code
from raytrain_plus.membership.slice_names import whole_weight
from raytrain_plus.observe.run_progress import after_step
from raytrain_plus.runs.folder import checkpoint_at, find_run, job_of
from raytrain_plus.runs.history import is_older, load_history
from raytrain_plus.runs.lightning_file import CountsEpochs, checkpoint_of
from raytrain_plus.runs.pretrained_folder import FromFolder, write_adapter, write_folder
from raytrain_plus.runs.program import exported, taken
from raytrain_plus.state.entry import REBUILT, to_export
from raytrain_plus.state.finite import not_finite
from raytrain_plus.state.slices import joined
from raytrain_plus.state.stored.checkpoint import Found, read_tensors
from raytrain_plus.state.stored.manifest import Manifest, best_of
from raytrain_plus.state.transfer import unpacked
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import is_address, split
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import model_to_load
from raytrain_plus.training.model.randomness import random_key
from raytrain_plus.training.model.rebuilt import check_same
from raytrain_plus.training.step.build import task_of

WriteFolder = Callable[[Any, Path, Iterable[Path]], None]
CPU = torch.device("cpu")
_TREE = has.object_of(persistent=has.list_of(has.text))
_SHARED = has.table_of(has.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Which:
    """Which checkpoint of a run to use: the newest, unless one field is set."""

    step: int | None = None
    """The one after this step, counted from 0."""
    best: bool = False
    """The best one, by the metric of `checkpoint.keep_best`."""
    name: str = ""
    """The one of this name."""


NEWEST = Which()


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights and persistent buffers of a model, by their names in its `state_dict`."""

    values: Mapping[str, torch.Tensor]
    rebuilt: Mapping[str, str] = field(default_factory=dict)
    """The digests of the frozen weights that the run has not saved: see `Task.rebuilt`."""


def load(
    path: str | Path,
    model: nn.Module,
    *,
    steps: int | None = None,
    best: bool = False,
    storage: str = "runs",
    step: int | None = None,
) -> int:
    """Load weights and persistent buffers of a run, or of a safetensors file, into `model`, in place.

    `path` is the path or address of a run's folder or of one of its checkpoints, the name of a run under `storage`, or
    the path of a safetensors file. Of a run, the newest checkpoint is used; or the one after `steps` steps, as
    `raytrain status` lists them; or the `best` one, by the metric of `checkpoint.keep_best`. Returns the step of the
    weights, counted from 0 as in events; -1 for a file. `step`, which counted from 0, is refused. Raises `InputError`
    for it, and if there are no such weights or they do not match `model`, which is then left unchanged.
    """
    if step is not None:
        raise InputError(
            "`step` is not an argument of load; `steps` counts steps made",
            where=f"step={step}",
            remedy=f"steps={step + 1} for what events and callbacks call step {step}, steps={step} for what "
            f"`raytrain status` calls step {step}",
        )
    if steps is not None and steps < 1:
        raise InputError(
            "no checkpoint is older than the first step",
            where=f"steps={steps}",
            expected="the number of steps made, from 1, as `raytrain status` lists them",
        )
    if not is_address(path) and Path(path).suffix != ".json" and Path(path).is_file():
        if steps is not None or best:
            raise InputError("a safetensors file has no checkpoints to choose from", where=str(path))
        made, weights, where = -1, _from_file(Path(path)), str(path)
    else:
        folder, which = which_of(path, Which(step=None if steps is None else steps - 1, best=best))
        known = is_address(folder) or Path(folder).is_dir()
        run = open_folder(folder) if known else find_run(str(folder), storage)
        manifest, weights = weights_of(run, which)
        made, where = manifest.step, run.where
    put_weights(weights, model, where)
    return made


def which_of(path: str | Path, which: Which) -> tuple[str | Path, Which]:
    """Return the run of `path`, which may be a checkpoint's folder, and which checkpoint to use.

    Raises `InputError` if more than one is chosen.
    """
    at = checkpoint_at(path)
    if (at is not None) + (which.step is not None) + which.best > 1:
        raise InputError(
            "more than one checkpoint is chosen", where=str(path), expected="a step, or the best one, or its folder"
        )
    return (path, which) if at is None else (at[0], Which(name=at[1]))


def weights_of(run: Folder, which: Which) -> tuple[Manifest, Weights]:
    """Return a complete checkpoint of a run, and what it has of the model.

    If none is chosen, it is the newest that is not damaged; others are skipped with a warning on stderr. Raises
    `InputError` if there is no complete checkpoint, or not the chosen one, or a still newer one was written by a newer
    version of this package.
    """
    damages = []
    chosen = which != NEWEST
    for found in _chosen(run, which) if chosen else load_history(run).found:
        if found.error is not None and not isinstance(found.error, DamagedError):
            raise found.error
        manifest, why = found.manifest, found.why if found.damaged or chosen else ""
        weights = Weights({})
        if manifest is not None:
            weights, why = _read(run, manifest)
        if why:
            damages.append(f"{found.name}: {why}")
            if not chosen:
                print(f"warning: the checkpoint {found.name} cannot be used: {why}", file=sys.stderr)
        elif manifest is not None:
            return manifest, weights
    raise InputError(
        ("the checkpoint cannot be used" if chosen else "no complete checkpoint")
        + "".join(f"; {damage}" for damage in damages),
        where=run.where,
        expected="a complete checkpoint" if chosen else "the folder of a run with a complete checkpoint",
        remedy="list the run's checkpoints with: raytrain status RUN",
    )


def _chosen(run: Folder, which: Which) -> list[Found]:
    """Return the chosen checkpoint alone. Raises `InputError` if the run does not have it."""
    found = load_history(run).found
    whole = [one.manifest for one in found if one.manifest is not None]
    if which.best:
        best = best_of(whole)
        if best is None:
            raise InputError(
                "no checkpoint is known to be the best",
                where=run.where,
                expected="a run whose job sets checkpoint.keep_best, after an evaluation",
                remedy="choose one by its step: raytrain status RUN lists them",
            )
        return [one for one in found if one.name == best.name]
    fits = [one for one in found if which.name == one.name or which.step == one.step]
    if not fits:
        asked = which.name or after_step(int(which.step or 0))
        there = ", ".join(str(manifest.step + 1) for manifest in whole) or "none"
        raise InputError(
            f"there is no checkpoint {asked}", where=run.where, expected=f"one of those after step {there}"
        )
    # Of a step made again, the newer checkpoint counts; the older one may be void.
    return fits[:1]


def _read(run: Folder, manifest: Manifest) -> tuple[Weights, str]:
    """Return what a checkpoint has of the model, and why it cannot be used; empty if it can."""
    if wrong := _TREE(manifest.tree) or _SHARED(manifest.tree.get("shared", {})):
        return Weights({}), f"invalid manifest: {wrong}"
    buffers = set(manifest.tree["persistent"])
    names = [
        name
        for name in to_export(manifest.tensors)
        if not name.startswith("buffer/") or name.partition("/")[2] in buffers
    ]
    digests = [name for name in manifest.tensors if name.startswith(REBUILT)]
    try:
        tensors = read_tensors(run, manifest, dict.fromkeys([*names, *digests]))
    except DamagedError as error:
        return Weights({}), f"{error.where}: {error.what}"
    # Slices of a weight have the digest of the whole one.
    rebuilt = {whole_weight(name.removeprefix(REBUILT)): tensors.pop(name)[2].tobytes().hex() for name in digests}
    cuts = {name: (kind, fused) for name, (kind, fused) in manifest.tree.get("cuts", {}).items()}
    whole = joined(tensors, cuts)
    weights = {name.partition("/")[2]: unpacked(packed, CPU) for name, packed in whole.items()}
    trained = {whole_weight(name) for group in manifest.tree.get("groups") or () for name in group["parameters"]}
    bad = not_finite((name, value) for name, value in weights.items() if name in trained)
    # Older versions wrote such checkpoints.
    return Weights(weights, rebuilt), f"'{bad[0]}' holds NaN or infinity" if bad else ""


def _from_file(file: Path) -> Weights:
    try:
        with safetensors.safe_open(file, "pt") as opened:
            rebuilt = json.loads((opened.metadata() or {}).get("rebuilt", "{}"))
            return Weights({name: opened.get_tensor(name) for name in opened.keys()}, rebuilt)  # noqa: SIM118
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"not a valid safetensors file: {error}", where=str(file)) from None


def put_weights(weights: Weights, model: nn.Module, where: str) -> None:
    """Copy tensors into a model by name; for tied tensors one name is enough.

    Raises `InputError` if names or shapes do not match, or if the model's frozen weights are not those that the run has
    not saved; the model is then unchanged.
    """
    values = weights.values
    mine = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = {}
    for name, value in mine.items():
        aliases.setdefault(id(value), []).append(name)
    given = {
        alias for name in (*values, *weights.rebuilt) for alias in (aliases[id(mine[name])] if name in mine else [name])
    }
    wrong = [f"{name} is not in the model" for name in sorted(given - mine.keys())]
    wrong += [f"{name} is only in the model" for name in sorted(mine.keys() - given)]
    wrong += [
        f"{name} is {list(value.shape)}, {list(mine[name].shape)} in the model"
        for name, value in values.items()
        if name in mine and value.shape != mine[name].shape
    ]
    if wrong:
        raise InputError(
            f"the weights do not match the model: {'; '.join(wrong[:3])}" + "; ..." * (len(wrong) > 3), where=where
        )
    check_same(mine, weights.rebuilt, where)
    with torch.no_grad():
        for name, value in values.items():
            mine[name].copy_(value)


def export_to(run: str, storage: str, to: Path, kind: str, which: Which, dtype: str = "fp32") -> str:
    """Export a checkpoint of a run, given by name, folder or address, or by the checkpoint's own folder.

    `kind`: `safetensors`, `transformers`, `adapter`, `lightning` or `torch-export`. `dtype`: see `export_weights`.
    Returns what was written, as a sentence. Raises `InputError` for anything but the first in bf16.
    """
    if kind != "safetensors" and dtype != "fp32":
        raise InputError(
            f"--dtype {dtype} cannot be combined with --format {kind}, which has the model's own dtypes",
            remedy="leave out --dtype, or use --format safetensors",
        )
    at, which = which_of(run, which)
    folder = find_run(str(at), storage)
    takes = ""
    if kind == "safetensors":
        manifest = export_weights(folder, to, [Path.cwd()], which, dtype)
    elif kind in ("transformers", "adapter"):
        write = write_folder if kind == "transformers" else write_adapter
        manifest = export_folder(folder, to, [Path.cwd()], which, write)
    elif kind == "lightning":
        manifest = export_checkpoint(folder, to, [Path.cwd()], which)
    else:
        manifest, inputs = export_program(folder, to, [Path.cwd()], which)
        takes = f"; it takes {inputs}"
    of = f"{split(folder.address)[1]}{', the best' * which.best}"
    return f"{to}: the model {after_step(manifest.step)} of {of}{takes}"


def export_weights(
    run: Folder, to: Path, roots: Sequence[Path] = (), which: Which = NEWEST, dtype: str = "fp32"
) -> Manifest:
    """Write the weights of a run to a safetensors file; return the manifest of their checkpoint.

    `roots`: where the task is found, which builds the frozen weights that the run has not saved, if there are such.

    `dtype`: `fp32` writes what the checkpoint has; `bf16` rounds floating-point weights with more digits to bfloat16.
    Buffers, such as running statistics, stay as they are. A tied weight is in the file under each name that it has in
    the model's `state_dict`, so that `load_state_dict` finds them all; older versions did not record these names.
    """
    manifest, held = weights_of(run, which)
    weights = dict(held.values)
    if held.rebuilt:
        _, module = _trained(run, *_job_and_code(run, roots), held, manifest.step + 1)
        named = dict(module.named_parameters(remove_duplicate=False))
        weights |= {name: named[name].detach().contiguous() for name in held.rebuilt}
    if dtype == "bf16":
        buffers = {name.partition("/")[2] for name in manifest.tensors if name.startswith("buffer/")}
        weights = rounded(weights, weights.keys() - buffers)
    shared = manifest.tree.get("shared", {}).items()
    # A file has no tensor twice: these are copies.
    weights |= {name: weights[first].clone() for name, first in shared if first in weights}
    _whole(to, lambda part: safetensors.torch.save_file(weights, part, metadata={"format": "pt"}))
    return manifest


def rounded(weights: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors; the floating-point ones among `names` are rounded to the nearest bfloat16."""
    wide = (torch.float32, torch.float64)
    return {
        name: value.to(torch.bfloat16) if name in names and value.dtype in wide else value
        for name, value in weights.items()
    }


def export_program(run: Folder, to: Path, roots: Sequence[Path], which: Which = NEWEST) -> tuple[Manifest, str]:
    """Write a model of a run as a `torch.export` program, which runs without the task's code.

    It takes what `Task.example` returns for a batch of step 0, or else that with which `Task.loss` calls the model.
    Returns the manifest of the checkpoint, and what the program takes, in words. Raises `InputError` if torch cannot
    export the model, `TaskError` if the task fails.
    """
    job, code = _job_and_code(run, roots)
    manifest, weights = weights_of(run, which)
    seen = _as_trained(run, job, roots)
    sample_order = sample_order_of(job, seen)
    task, module = _trained(run, job, code, weights, sample_order.steps)
    module.eval()
    rows = rows_of(job, seen, code.transform)
    table = pa.concat_tables([without_ids(rows.read(one)) for one in sample_order.row_ranges(0, 0)])
    if table.num_rows == 1:
        # torch takes a single row for the only number of rows that the model supports.
        table = pa.concat_tables([table, table])
    where = f"task: {job.task}"
    args, kwargs = _arguments(task, module, table, where)
    try:
        program = exported(module, args, kwargs)
    except Exception as error:
        raise InputError(
            f"torch.export failed for this model: {type(error).__name__}: {first_line(error)}",
            where=where,
            remedy="--format safetensors",
        ) from error
    _whole(to, lambda part: torch.export.save(program, part))
    return manifest, taken(program)


def export_folder(
    run: Folder, to: Path, roots: Sequence[Path], which: Which = NEWEST, write: WriteFolder = write_folder
) -> Manifest:
    """Write a model of a run as a folder that `from_pretrained` opens, with the tokenizer or processor of the job.

    `write`: writes the folder. Returns the manifest of the checkpoint. Raises `InputError` for a model that is none of
    Transformers'.
    """
    job, code = _job_and_code(run, roots)
    manifest, weights = weights_of(run, which)
    # What it learned from does not matter to it: `Task.run` says how long a run is.
    task, module = _trained(run, job, code, weights, manifest.step + 1)
    beside = [task.folder] if isinstance(task, FromFolder) and task.folder is not None else []
    tokenizer = None if job.data.tokenizer is None else Path(job.data.tokenizer)
    if tokenizer is not None:
        beside.append(tokenizer if tokenizer.is_dir() else tokenizer.parent)
    write(module, to, beside)
    return manifest


def export_checkpoint(run: Folder, to: Path, roots: Sequence[Path], which: Which = NEWEST) -> Manifest:
    """Write a LightningModule of a run as a file that `load_from_checkpoint` opens.

    Returns the manifest of the checkpoint. Raises `InputError` for a model that is none of Lightning's.
    """
    job, code = _job_and_code(run, roots)
    manifest, weights = weights_of(run, which)
    steps = manifest.step + 1
    task, module = _trained(run, job, code, weights, steps)
    epochs = task.epochs_after(steps) if isinstance(task, CountsEpochs) else 0
    found = checkpoint_of(module, steps, epochs)
    _whole(to, lambda part: torch.save(found, part))
    return manifest


def _job_and_code(run: Folder, roots: Sequence[Path]) -> tuple[Job, UserCode]:
    job = job_of(run)
    assert isinstance(job.task, str), "the job of a run names its task"
    return job, load_user_code(job, roots)


def _trained(run: Folder, job: Job, code: UserCode, weights: Weights, steps: int) -> tuple[Task, nn.Module]:
    """Return the task, and its model with these weights."""
    set_random_key(random_key(job.seed, "task"))
    task = task_of(job, code.task, steps)
    module = model_to_load(task, job.seed)
    put_weights(weights, module, run.where)
    return task, module


def _arguments(task: Task, module: nn.Module, table: pa.Table, where: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and keyword arguments with which a model is exported. Raises `InputError` if it has none.

    `where`: the task, for errors.
    """
    name = type(task).__name__
    with as_task_error(f"{name} failed on a batch", where):
        batch = task.collate(table)
        # A task may have an attribute of that name for itself.
        example = None if type(task).example is Task.example else task.example(batch)
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping):
        return (), example
    if example is not None:
        raise TaskError(
            f"{name}.example returned {type(example).__name__}",
            where=where,
            expected="a tuple of the model's positional arguments, or a dict of its keyword arguments",
            remedy="for a model of one argument: return (batch['x'],)",
        )
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad(), as_task_error(f"{name} failed on a batch", where):
        task.loss(module, batch)
    hook.remove()
    if not calls:
        what = "the task never calls its model as a whole"
        remedy = "define Task.example, which returns the model's arguments; or use --format safetensors"
        raise InputError(what, where=where, remedy=remedy)
    return calls[0]


def _as_trained(run: Folder, job: Job, roots: Sequence[Path]) -> Source:
    """Return the training data with the types that the run read, to which held-out data may have added."""
    older = is_older(run)
    try:
        return both_data(job, roots, older=older)[0]
    except (DataError, TaskError, WaitExpired):
        # The held-out data may be gone.
        return training_data(job, roots, older=older)


def _whole(to: Path, write: Any) -> None:
    """Write a file under a temporary name, then rename it; make its folder. Raises `InputError` if this fails."""
    part = to.with_name(f".{to.stem}.part{to.suffix}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Some writers create a file that only its owner may read: it gets the mode of any other new file.
            part.touch()
            mode = part.stat().st_mode
            write(part)
            part.chmod(mode)
            os.replace(part, to)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"the file cannot be written: {error}", where=str(to)) from None
