"""Check that a model that is cut into slices computes what the whole one does, layer by layer, on one microbatch.

Each slice has a host of its own. The layers get the same inputs, and the loss's gradients go back through all of them.
Weights and outputs that all hosts have must have the same bits on each, or the hosts would drift apart.

With `reduction: exact` also that the bits are the same, whether one worker hosts all slices or each has one. Matrix
products are, because each slice makes its own. But a CPU computes functions such as SiLU otherwise, in the last bit,
for the few values at the end of a tensor that fill no register, and where a tensor ends depends on what is hosted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import RaytrainError, TaskError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.slice_names import layer_of, slice_number, whole_weight
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.transport import Returned, Tensors
from raytrain_plus.parallel.tensor.modules import part_of
from raytrain_plus.parallel.tensor.simulated_hosts import Hosts
from raytrain_plus.parallel.tensor.slice_plan import DIVIDES, OF_EXPERTS, WHERE, cuts_of
from raytrain_plus.parallel.tensor.slicing import Slicing, cuts_in, module_names, stacked_experts
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import Built, build_layers, pass_names, train_as_built
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import slicing_of
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.trial.measure import Alone, alone_loss, each_layer, forward

TOLERANCE = 1e-3
"""The largest difference of two outputs, of the largest value of one: they round differently."""
OF_GRADIENT, OF_ALL = 1e-2, 1e-5
"""The largest difference of two gradients: of the largest value of one, and of the largest of all gradients, since some
consist of rounding errors alone, such as that of a bias of keys."""

Gradients = Mapping[str, torch.Tensor]
"""Of weights, by name."""


def check_slices(job: Job, task: Task, device: torch.device, batch: Microbatch) -> None:
    """Raise `TaskError` if the job's slices, each on a host of its own, do not compute what the whole layers do.

    With `reduction: exact` also if they have other bits than on one host.
    """
    slices = job.parallel.slices
    slicing = slicing_of(job, task)
    assert slicing is not None, "the job cuts something"
    names = pass_names(task, job.seed, in_one=job.parallel.in_one_stage)
    if job.parallel.tensor > 1 and not set(slicing.plan.values()) - set(OF_EXPERTS):
        raise TaskError(
            f"the job cuts the model into {slices} slices, but {type(task).__name__}.tensor() names nothing to cut",
            where=f"parallel.tensor: {slices}",
            expected="a plan, such as {'block*.up': 'colwise', 'block*.down': 'rowwise'}",
        )
    modules, experts = list[str](), list[str]()
    for built in build_layers(task, job.seed, device, names=names):
        # One layer at a time: all of them may be too large for one process.
        layer = dict(built.module.named_children())
        modules += module_names(layer)
        experts += stacked_experts(layer)
    cuts = cuts_of(slicing.plan, modules)
    if slicing.experts and not (experts or any(cut.kind == "experts" for cut in cuts.values())):
        raise TaskError(
            f"the job divides experts into {slices} slices, but the model has no layers.Experts, and "
            f"{type(task).__name__}.tensor() names no others",
            where=f"parallel.experts: {slices}",
            expected="a plan such as {'block*.experts': 'experts'}, for modules with num_experts parts of each weight",
            remedy="for a model of Transformers, return layers.own_plan(model), if its own ep_plan names its experts",
        )
    hosts = Hosts(slices)
    slicings: list[Slicing | None] = [None, *(replace(slicing, link=hosts.link(host)) for host in hosts)]
    if job.reduction == "exact":
        slicings.append(slicing)
    check = _Check(task, job.seed, device, batch, names, hosts, slicings)
    check.outputs()
    check.gradients()


@dataclass(frozen=True, slots=True)
class _Passed:
    """A layer after its forward pass."""

    chunk: Chunk
    output: Any
    drawn: float
    """The next random number."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those of the loss."""
        given = {} if isinstance(self.output, Tensors) else self.output.metrics
        return {name: float(value) for name, value in given.items()}

    @property
    def values(self) -> list[torch.Tensor]:
        """The tensors of the output."""
        return self.output.values if isinstance(self.output, Tensors) else [self.output.loss]


class _Check:
    """The passes of a microbatch, which every layer makes whole, with a host for each slice, and perhaps on one host.

    Each layer is built for its forward pass, and again for its backward pass: all of them may be too large for one
    process.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        device: torch.device,
        batch: Microbatch,
        names: tuple[str, ...],
        hosts: Hosts,
        slicings: Sequence[Slicing | None],
    ) -> None:
        """`slicings`: of the whole layers (None), of each host, and of one host with all slices if that is wanted."""
        self._task, self._seed = task, seed
        self._names, self._slicings = names, slicings
        self._hosts, self._count = hosts, len(hosts)
        self._technique = Technique(Precision("fp32", device))
        self._work = Alone(partial(alone_loss, task), seed, self._technique, batch)
        self._inputs: list[Tensors | None] = [None]
        """The input of each layer; that of the first one is the batch."""
        self._divided: list[list[bool]] = [[]]
        """Which tensors of it are divided between hosts."""

    def outputs(self) -> None:
        """Compare what the layers return."""
        for number, (name, built) in enumerate(zip(self._names, self._built(self._names), strict=True)):
            expected, found, together = self._forward(number, name, built)
            _compare(name, expected, found)
            for one in found:
                _compare_metrics(self._count, expected.metrics, one.metrics)
            for one in together:
                pairs = zip(one.values, _together(found, expected.values), strict=True)
                _refuse_bits(name, [f"output {at}" for at, pair in enumerate(pairs) if not torch.equal(*pair)])
            if isinstance(expected.output, Tensors):
                values = [value.detach().requires_grad_(value.requires_grad) for value in expected.values]
                self._inputs.append(Tensors(values, expected.output.tree))
                pairs = zip(found[0].values, expected.values, strict=True)
                self._divided.append([one.shape != value.shape for one, value in pairs])

    def gradients(self) -> None:
        """Compare the gradients of the weights, from the last layer to the first."""
        compared: list[_Difference] = []
        back = [Returned([]) for _ in self._slicings]
        for number, built in zip(reversed(range(len(self._names))), self._built(self._names[::-1]), strict=True):
            name = self._names[number]
            expected, found, together = self._forward(number, name, built)
            passed = [
                _backward(expected, back[0]),
                *self._hosts.run([partial(_backward, *pair) for pair in zip(found, back[1:], strict=False)]),
                *(_backward(one, back[-1]) for one in together),
            ]
            back = [one[1] for one in passed]
            (whole, *apart), alone = [one[0] for one in passed[: self._count + 1]], passed[self._count + 1 :]
            _compare_hosts(apart)
            for gradients, _ in alone:
                others = [at for own in apart for at, value in own.items() if not torch.equal(value, gradients[at])]
                _refuse_bits(name, others)
            compared += _differences(whole, [_untied(one, built[1].tied) for one in apart], built[1].module)
        largest = max((one.largest for one in compared), default=0.0)
        for one in compared:
            one.check(self._count, largest)

    def _built(self, names: tuple[str, ...]) -> Iterator[list[Built]]:
        """Yield layers as each of the slicings has them."""
        each = [each_layer(self._task, self._seed, self._technique, names, one) for one in self._slicings]
        for layers in zip(*each, strict=True):
            yield [built for _, built in layers]

    def _forward(self, number: int, name: str, built: Sequence[Built]) -> tuple[_Passed, list[_Passed], list[_Passed]]:
        """Run the forward passes of a layer: whole, on each host, and on one host if that is wanted."""
        layer = partial(_pass, number=number, count=len(self._names), work=self._work)
        modules = [train_as_built(one.module) for one in built]
        expected = layer(modules[0], self._inputs[number])
        with _explained(name, self._count):
            found = self._hosts.run(
                [partial(layer, modules[1 + host], self._given(number, host)) for host in self._hosts]
            )
        return expected, found, [layer(one, self._inputs[number]) for one in modules[1 + self._count :]]

    def _given(self, number: int, host: int) -> Tensors | None:
        """Return what a layer gets on a host."""
        given = self._inputs[number]
        if given is None:
            return None
        pairs = zip(given.values, self._divided[number], strict=True)
        return Tensors([value.chunk(self._count, -2)[host] if own else value for value, own in pairs], given.tree)


def _pass(module: nn.Module, given: Tensors | None, *, number: int, count: int, work: Alone) -> _Passed:
    """Run the forward pass of a layer."""
    chunk = Chunk(module, number, [0] * count)
    output = forward(chunk, work, given)
    drawn = float(torch.rand(1, device=next(module.parameters(), torch.empty(0)).device))
    return _Passed(chunk, output, drawn)


def _backward(passed: _Passed, back: Returned) -> tuple[Gradients, Returned]:
    """Run the backward pass of a layer, given the gradients of its outputs; return those of its weights and inputs."""
    chunk = passed.chunk
    if isinstance(passed.output, Tensors):
        chunk.set_local_bwd_input(back, 0)
    chunk.backward_one_chunk(0)
    weights = {name: value.grad for name, value in chunk.submod.named_parameters() if value.grad is not None}
    return weights, Returned([]) if chunk.is_first else chunk.get_local_bwd_output(0)


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


def _together(found: Sequence[_Passed], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of all hosts together; those of the first one where each has the whole."""
    values = zip(*(one.values for one in found), strict=True)
    return [
        torch.cat(parts, -2) if parts[0].shape != one.shape and parts[0].dim() > 1 else parts[0]
        for parts, one in zip(values, like, strict=True)
    ]


def _compare(name: str, expected: _Passed, found: Sequence[_Passed]) -> None:
    """Raise `TaskError` if outputs of a layer differ by more than rounding, or in the random numbers that it draws."""
    slices = len(found)
    if any(one.drawn != expected.drawn for one in found):
        raise TaskError(
            f"{_said(name)} draws random numbers that would depend on how many slices a worker hosts",
            where=WHERE,
            expected="no dropout between what is cut colwise and what is cut rowwise, such as dropout_p of "
            f"scaled_dot_product_attention; and an nn.Dropout elsewhere as {DIVIDES} if the norms are",
            remedy="set it to 0, and keep the dropout after the rowwise layer",
        )
    for at, (one, other) in enumerate(zip(expected.values, _together(found, expected.values), strict=True)):
        alike = one.shape == other.shape
        largest, difference = (_largest(value) for value in (one, _difference(one, other))) if alike else (0.0, 0.0)
        if not alike or not difference <= TOLERANCE * max(largest, 1e-6):
            what = f"by {difference:.3g}, where the largest value is {largest:.3g}" if alike else "in shape"
            raise TaskError(
                f"{_said(name)} returns something else when it is cut into {slices} slices: it differs {what}",
                where=WHERE,
                expected="a plan under which each slice computes alone: colwise, then rowwise, with whole heads",
                remedy="if one weight holds several projections, call the layer qkv (three equal ones) or gate_up "
                "(two), or use a layer for each",
            )
        if found[0].values[at].shape == one.shape and not all(_same(host.values[at], other) for host in found):
            raise TaskError(
                f"{_said(name)} returns something else on each of the workers that have one of {slices} slices",
                where=WHERE,
                expected="values that all workers have alike, or positions that are divided between them",
                remedy=_ENTER,
            )


_ENTER = (
    f"with {DIVIDES}, positions are divided from a vocab embedding or a rowwise layer on, and together again after a "
    "colwise layer without a rowwise one beside it"
)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two hosts have the same bits, or, on a GPU, the same but for rounding."""
    return torch.equal(one, other) if one.device.type == "cpu" else torch.allclose(one, other, rtol=TOLERANCE)


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return by how much values differ; those that are no floating-point numbers by 1."""
    return one.detach() - other.detach() if one.is_floating_point() else (one != other).float()


def _largest(values: torch.Tensor) -> float:
    """Return the largest of some values, without signs."""
    return values.detach().float().abs().max().item() if values.numel() else 0.0


def _refuse_bits(name: str, others: Sequence[str]) -> None:
    """Raise `TaskError` if any values of a layer have other bits on hosts of their own than on one."""
    if others:
        raise TaskError(
            f"{_said(name)} computes other last bits when its slices are hosted apart (first in {others[0]})",
            where="reduction: exact",
            expected="a number of features in each slice that fills the registers of a CPU: a multiple of 64",
            remedy="use fewer slices or another width, or reduction: ring",
        )


def _compare_hosts(apart: Sequence[Gradients]) -> None:
    """Raise `TaskError` if hosts have different gradients of a weight that all have."""
    for name, value in apart[0].items():
        others = [own[name] for own in apart[1:] if name in own]
        if not all(_same(value, other) for other in others):
            raise _partial(name, len(apart))


def _partial(name: str, slices: int) -> TaskError:
    return TaskError(
        f"'{name}' gets another gradient on a worker with one of {slices} slices than in the whole model",
        where=WHERE,
        expected="layers that each compute with all heads, features and positions, or are named in the plan",
        remedy="name a norm of the heads of a slice as replicated_with_grad_allreduce; " + _ENTER,
    )


def _untied(gradients: Gradients, tied: Mapping[str, str]) -> Gradients:
    """Return gradients in which those of a copy are added to its owner's, as a model without layers has them."""
    found = dict(gradients)
    for copy, owner in tied.items():
        if copy in found and owner in found:
            found[owner] = found[owner] + found.pop(copy)
    return found


@dataclass(frozen=True, slots=True)
class _Difference:
    """By how much a gradient differs between hosts and the whole model, and its largest value there."""

    name: str
    by: float
    largest: float

    def check(self, slices: int, of_all: float) -> None:
        """Raise `TaskError` if that is more than rounding; `of_all`: the largest value of all gradients."""
        if not self.by <= OF_GRADIENT * self.largest + OF_ALL * of_all:
            raise _partial(self.name, slices)


def _differences(whole: Gradients, apart: Sequence[Gradients], module: nn.Module) -> list[_Difference]:
    """Compare gradients of the whole layer with those of hosts; `module`: as a host has it.

    A gradient that only one side has counts as one of zeros on the other.
    """
    cuts = cuts_in(module)
    found = []
    for own in apart:
        for name in dict.fromkeys([*own, *(one for one in whole if one.rpartition(".")[0] not in cuts)]):
            of_whole = whole_weight(name)
            if (value := whole.get(of_whole)) is not None and layer_of(name) != name:
                kind, fused = cuts[of_whole.rpartition(".")[0]]
                value = part_of(value, kind, fused, slice_number(name.partition(".")[0]), len(apart))
            other = own.get(name)
            either = value if value is not None else other
            assert either is not None, "one side has it"
            by = either if value is None or other is None else value - other
            found.append(_Difference(of_whole, _largest(by), _largest(either)))
    given = {whole_weight(name) for own in apart for name in own}
    found += [_Difference(name, _largest(value), _largest(value)) for name, value in whole.items() if name not in given]
    return found
