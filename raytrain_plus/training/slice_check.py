"""Check that a model that is cut into slices computes what the whole one does, layer by layer, on one microbatch.

With `reduction: exact` also that the bits are the same, whether one worker hosts all slices or each has one. Matrix
products are, because each slice makes its own. But a CPU computes functions such as SiLU otherwise, in the last bit,
for the few values at the end of a tensor that fill no register, and where a tensor ends depends on what is hosted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from raytrain_plus.data.microbatches import Microbatch
from raytrain_plus.errors import RaytrainError, TaskError
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.transport import Tensors
from raytrain_plus.parallel.tensor.hosts import Hosts
from raytrain_plus.parallel.tensor.plan import WHERE, cuts_of
from raytrain_plus.parallel.tensor.slicing import Slicing, module_names
from raytrain_plus.task import Task
from raytrain_plus.training.loss import task_loss
from raytrain_plus.training.measure import Alone, backward, each_layer, forward
from raytrain_plus.training.model import build_layers, pass_names
from raytrain_plus.training.precision import Precision
from raytrain_plus.training.technique import Technique

TOLERANCE = 1e-3
"""The largest difference of two outputs, of the largest value of one: they round differently."""


def check_slices(job: Job, task: Task, device: torch.device, batch: Microbatch) -> None:
    """Raise `TaskError` if the job's slices, each on a host of its own, do not compute what the whole layers do.

    With `reduction: exact` also if they have other bits than on one host.
    """
    slices, plan = job.parallel.tensor, task.tensor()
    names = pass_names(task, job.seed, in_one=job.parallel.in_one_stage)
    if not plan:
        raise TaskError(
            f"the job cuts the model into {slices} slices, but {type(task).__name__}.tensor() names nothing to cut",
            where=f"parallel.tensor: {slices}",
            expected="a plan, such as {'block*.up': 'colwise', 'block*.down': 'rowwise'}",
        )
    layers = (dict(built.module.named_children()) for built in build_layers(task, job.seed, device, names=names))
    cuts_of(plan, [name for one in layers for name in module_names(one)])
    technique, hosts = Technique(Precision("fp32", device)), Hosts(slices)

    def built(slicing: Slicing | None) -> Iterator[nn.Module]:
        return (one.module.train() for _, one in each_layer(task, job.seed, technique, names, slicing))

    whole, apart = built(None), [built(Slicing(plan, slices, hosts.link(host))) for host in hosts]
    together = built(Slicing(plan, slices)) if job.reduction == "exact" else None
    given: Tensors | None = None
    of_hosts: list[Tensors | None] = [None] * slices
    work = _Noting(task, job.seed, technique, batch)
    for number, (name, module) in enumerate(zip(names, whole, strict=True)):
        layer = partial(_pass, number=number, count=len(names), work=work)
        expected = layer(module, given)
        with _explained(name, slices):
            found = hosts.run([partial(layer, next(one), part) for one, part in zip(apart, of_hosts, strict=True)])
        _compare(name, slices, expected, found)
        for one in found:
            _compare_metrics(slices, expected.metrics, one.metrics)
        gradients = hosts.run([one.gradients for one in found])
        _compare_gradients(slices, expected.gradients(), gradients)
        if together is not None:
            alone = layer(next(together), given)
            _compare_bits(name, alone, found, alone.gradients(), gradients)
        given = expected.output
        of_hosts = [_given_to(host, expected, found) for host in hosts]


class _Noting(Alone):
    """A microbatch that notes the metrics that its loss returned last."""

    metrics: Mapping[str, float] = MappingProxyType({})

    def loss(self, microbatch: int, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `chunk.PassWork`."""
        found = task_loss(self._task, model, batch, self.rows(microbatch))
        self.metrics = {name: float(value) for name, value in found.metrics.items()}
        return found.weighted()


@dataclass(frozen=True, slots=True)
class _Passed:
    """A layer after its forward pass."""

    chunk: Chunk
    output: Any
    drawn: float
    """The next random number."""
    metrics: Mapping[str, float]
    """Those of the loss."""

    @property
    def values(self) -> list[torch.Tensor]:
        """The tensors of the output."""
        return self.output.values if isinstance(self.output, Tensors) else [self.output]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Run the backward pass; return the gradients of the weights."""
        backward(self.chunk, self.output)
        named = self.chunk.submod.named_parameters()
        return {name: value.grad for name, value in named if value.grad is not None}


def _pass(module: nn.Module, given: Tensors | None, *, number: int, count: int, work: _Noting) -> _Passed:
    """Run the forward pass of a layer."""
    chunk = Chunk(module, number, [0] * count)
    output = forward(chunk, work, given)
    drawn = float(torch.rand(1, device=next(module.parameters(), torch.empty(0)).device))
    return _Passed(chunk, output, drawn, work.metrics)


def _said(name: str) -> str:
    """Return what has failed, in words; a model without layers has no name."""
    return f"the layer '{name}'" if name else "the model"


@contextmanager
def _explained(name: str, slices: int) -> Iterator[None]:
    """Turn what a layer raises with one of its slices into a `TaskError` that says what to do."""
    try:
        yield
    except RaytrainError:
        raise
    except Exception as error:
        raise TaskError(
            f"{_said(name)} cannot compute with one of {slices} slices: {type(error).__name__}: {error}",
            where=WHERE,
            expected=f"code for any number of heads or features, and {slices} slices that divide them",
            remedy="write view(..., -1, head_dim) where a number of heads stands; with sequence_parallel, take the "
            "length from what a colwise layer returns",
        ) from None


def _compare_metrics(slices: int, expected: Mapping[str, float], found: Mapping[str, float]) -> None:
    """Raise `TaskError` if a metric of the loss differs by more than rounding."""
    for name, value in expected.items():
        other = found.get(name, math.nan)
        if not math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) and not math.isnan(value):
            raise TaskError(
                f"the metric '{name}' of the loss is {other:.4g} on a worker with one of {slices} slices, and "
                f"{value:.4g} with all",
                where=WHERE,
                expected="metrics that need no scores of other workers' tokens, which colwise_loss leaves there",
                remedy="return it from evaluate, where the model returns all scores, or cut the head colwise",
            )


def _own(value: torch.Tensor, like: torch.Tensor, host: int, hosts: int) -> torch.Tensor:
    """Return what a host has of an output: the whole, or its positions if that is what it has computed."""
    return value if value.shape == like.shape or value.dim() < 2 else value.chunk(hosts, -2)[host]


def _given_to(host: int, expected: _Passed, found: Sequence[_Passed]) -> Tensors | None:
    """Return what a host's next layer gets of the whole layer's output."""
    if not isinstance(expected.output, Tensors):
        return None
    pairs = zip(expected.values, found[host].values, strict=True)
    return Tensors([_own(value, like, host, len(found)) for value, like in pairs], expected.output.tree)


def _together(found: Sequence[_Passed], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of all hosts together; those of the first one where each has the whole."""
    values = zip(*(one.values for one in found), strict=True)
    return [
        torch.cat(parts, -2) if parts[0].shape != one.shape and parts[0].dim() > 1 else parts[0]
        for parts, one in zip(values, like, strict=True)
    ]


def _compare_bits(
    name: str,
    alone: _Passed,
    found: Sequence[_Passed],
    of_alone: Mapping[str, torch.Tensor],
    apart: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Raise `TaskError` if outputs of a layer, or gradients, have other bits on hosts of their own than on one."""
    outputs = zip(alone.values, _together(found, alone.values), strict=True)
    others = [f"output {number}" for number, pair in enumerate(outputs) if not torch.equal(*pair)]
    others += [what for own in apart for what, value in own.items() if not torch.equal(value, of_alone[what])]
    if others:
        raise TaskError(
            f"{_said(name)} computes other last bits when its slices are hosted apart (first in {others[0]})",
            where="reduction: exact",
            expected="a number of features in each slice that fills the registers of a CPU: a multiple of 64",
            remedy="use fewer slices or another width, or reduction: ring",
        )


def _compare_gradients(
    slices: int, expected: Mapping[str, torch.Tensor], apart: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Raise `TaskError` if a weight that is not cut gets the gradient of some slices only."""
    largest = max((value.abs().max().item() for value in expected.values() if value.numel()), default=0.0)
    for found in apart:
        for name in expected.keys() & found.keys():
            difference = (expected[name] - found[name]).abs()
            if difference.numel() and not difference.max().item() <= TOLERANCE * max(largest, 1e-6):
                raise TaskError(
                    f"the gradient of '{name}', which is not cut, differs on a worker with one of {slices} slices: its "
                    "module computes with some heads or features only",
                    where=WHERE,
                    expected="weights outside of what is cut, or in a module that all slices have",
                    remedy=f"name '{name.rpartition('.')[0]}' in the plan, as replicated_with_grad_allreduce",
                )


def _compare(name: str, slices: int, expected: _Passed, found: Sequence[_Passed]) -> None:
    """Raise `TaskError` if outputs of a layer differ by more than rounding, or in the random numbers that it draws."""
    if expected.drawn != found[0].drawn:
        raise TaskError(
            f"{_said(name)} draws random numbers that would depend on how many slices a worker hosts",
            where=WHERE,
            expected="no dropout between what is cut colwise and what is cut rowwise, such as dropout_p of "
            "scaled_dot_product_attention; and an nn.Dropout elsewhere as sequence_parallel if the norms are",
            remedy="set it to 0, and keep the dropout after the rowwise layer",
        )
    for one, other in zip(expected.values, _together(found, expected.values), strict=True):
        alike = one.shape == other.shape
        largest = one.detach().abs().max().item() if alike and one.numel() else 0.0
        difference = (one - other).detach().abs().max().item() if alike and one.numel() else 0.0
        if not alike or not difference <= TOLERANCE * max(largest, 1e-6):
            what = f"by {difference:.3g}, where the largest value is {largest:.3g}" if alike else "in shape"
            raise TaskError(
                f"{_said(name)} returns something else when it is cut into {slices} slices: it differs {what}",
                where=WHERE,
                expected="a plan under which each slice computes alone: colwise, then rowwise, with whole heads",
                remedy="if one weight holds several projections, call the layer qkv (three equal ones) or gate_up "
                "(two), or use a layer for each",
            )
