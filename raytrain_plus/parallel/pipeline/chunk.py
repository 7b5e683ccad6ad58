"""A chunk: a run of layers at one position of a pipeline, as torch's schedules drive it.

A schedule says when; a chunk computes, and hands on what it has. The task's loss runs where the chunk is the first, up
to where it calls the model, and again, whole, where the chunk is the last: there the model gives what the layers before
have given. So whatever a loss does before and after the model is done as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.parallel.pipeline.transport import Handovers, Tensors, apart


class Work(Protocol):
    """What a cell computes in one step: microbatches, numbered over all its shards."""

    def rows(self, microbatch: int) -> int:
        """How many rows it has."""

    def batch(self, microbatch: int) -> Any:
        """The batch itself; asked for where the first and the last chunk are."""

    def loss(self, microbatch: int, model: nn.Module, batch: Any) -> torch.Tensor:
        """Its loss, ready for the backward pass; asked for where the first and the last chunk are."""

    def computing(self, kind: Kind, chunk: int, microbatch: int) -> AbstractContextManager[None]:
        """Open while the chunk computes: random numbers, buffers and interrupts are its matter."""


@dataclass(slots=True)
class _Open:
    """A microbatch between its forward and its backward pass."""

    inputs: list[torch.Tensor]
    """Those that take part in the backward pass, as leaves."""
    outputs: list[torch.Tensor]
    """The same; of the last chunk, the loss."""
    gradients: list[torch.Tensor] | None = None
    groups: list[dict[str, Any]] | None = None
    """What is left to do for the weights; None where all is."""


class Chunk:
    """See the module. Its public names are those that torch's schedules ask for (torch 2.13)."""

    def __init__(
        self,
        layers: nn.Module,
        index: int,
        holders: Sequence[int],
        handovers: Handovers | None = None,
        splits: bool = False,
    ) -> None:
        """`holders`: for each chunk of the model, the stage that has it; `handovers` to the others, where there are
        any. `splits`: whether backward passes come in two parts."""
        self.submod = layers
        self.stage_index = index
        self.num_stages = len(holders)
        self.group_rank = holders[index]
        self.group_size = max(holders) + 1
        self.is_first = index == 0
        self.is_last = index == len(holders) - 1
        self.most_open = 0
        """The most microbatches whose activations were held at once."""
        self._holders = holders
        self._splits = splits
        self._handovers = handovers
        self._work: Work | None = None
        self._count = 0
        self._follows: list[bool] | None = None
        """Of each output, whether it depends on an input."""
        self._open: dict[int, _Open] = {}
        self._given: dict[int, Tensors] = {}
        """What another chunk of this stage has given."""
        self._returned: dict[int, list[torch.Tensor]] = {}
        """The gradients that another chunk of this stage has given back."""
        self._back: dict[int, list[torch.Tensor]] = {}
        """The gradients to give back."""
        first = next(layers.children(), layers)
        self._writes = any(getattr(module, "inplace", False) for module in first.modules())
        names = [name for name, _ in layers.named_children()]
        self._last_layer = f"the layer '{names[-1]}'" if names else "the model"

    def begin(self, work: Work, microbatches: int) -> None:
        """A step begins: what earlier ones have left, if they were left early, is forgotten."""
        self._work = work
        self._count = microbatches
        self.most_open = 0
        for kept in (self._open, self._given, self._returned, self._back):
            kept.clear()

    # What torch's schedules call. They are given no operations: this stage's own are started, and waited for, here.

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Begins to receive activations."""
        if not self.is_first:
            before = self.stage_index - 1
            self._passing.expect("forward", before, microbatch, self._rows(microbatch), self._holders[before])
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        """Nothing: a forward pass has sent what it gave."""
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Begins to receive gradients."""
        if not self.is_last:
            after = self._holders[self.stage_index + 1]
            self._passing.expect("backward", self.stage_index, microbatch, self._rows(microbatch), after)
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        """Nothing: a backward pass has sent what it gave."""
        return []

    def forward_one_chunk(self, microbatch: int, *unused: Any, **also_unused: Any) -> Any:
        """The forward pass of a microbatch; what it gives, the loss where the chunk is the last."""
        given = None if self.is_first else self._take(microbatch)
        inputs = [value for value in given.values if value.requires_grad] if given is not None else []
        if given is not None and self._writes:
            # The first layer writes in place, which the leaf of a graph does not bear.
            given = Tensors([value.clone() for value in given.values], given.tree)
        work, output = self._working, None
        batch = work.batch(microbatch) if self.is_first or self.is_last else None
        with work.computing("F", self.stage_index, microbatch):
            if self.is_last and given is not None:
                whole = given.whole()
                model = _Stand(self.submod, lambda *arguments, **named: self.submod(whole))
                output = work.loss(microbatch, model, batch)
            elif given is not None:
                output = self.submod(given.whole())
            else:
                output = self._up_to_the_end(work, microbatch, batch)
        if self.is_last:
            self._keep(microbatch, _Open(inputs, [output]))
            return output
        tensors = apart(output, self._last_layer)
        if self._splits:
            # What computes the parts of a backward pass detaches outputs in place, which views do not bear.
            tensors.values[:] = [value.clone() if value._is_view() else value for value in tensors.values]
        self._keep(microbatch, _Open(inputs, [value for value in tensors.values if value.requires_grad]))
        to = self._holders[self.stage_index + 1]
        if to != self.group_rank:
            rows = self._rows(microbatch)
            self._passing.send(self.stage_index, microbatch, rows, tensors, to, self._last_layer)
        return tensors

    def backward_one_chunk(
        self, microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch: whole, or for the chunk's input alone."""
        now = self._open[microbatch]
        now.gradients = None if self.is_last else self._take_gradients(microbatch)
        if full_backward:
            with self._working.computing("B", self.stage_index, microbatch):
                torch.autograd.backward(now.outputs, now.gradients)
            del self._open[microbatch]
        else:
            with self._working.computing("I", self.stage_index, microbatch):
                # Where no input needs a gradient, the weights' turn is for all of it.
                if now.inputs:
                    self._backward_input(now)
        if not self.is_first:
            self._give_back(microbatch, now.inputs)

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool = False) -> None:
        """What is left of the backward pass of a microbatch: the gradients of the weights."""
        now = self._open.pop(microbatch)
        with self._working.computing("W", self.stage_index, microbatch):
            if now.groups is None:
                torch.autograd.backward(now.outputs, now.gradients)
            else:
                stage_backward_weight(self.submod.parameters(), now.groups)

    def set_local_fwd_input(self, given: Tensors, microbatch: int) -> None:
        """What another chunk of this stage gives."""
        # Each chunk's own graph ends at its input.
        values = [value.detach().requires_grad_(value.requires_grad) for value in given.values]
        self._given[microbatch] = Tensors(values, given.tree)

    def get_local_bwd_output(self, microbatch: int) -> list[torch.Tensor]:
        """The gradients for another chunk of this stage."""
        return self._back.pop(microbatch)

    def set_local_bwd_input(self, gradients: list[torch.Tensor], microbatch: int) -> None:
        """The gradients that another chunk of this stage gives back."""
        self._returned[microbatch] = gradients

    def perform_reduce_grad(self, scale: int) -> None:
        """Nothing: gradients are summed over cells elsewhere."""

    # The rest

    @property
    def _working(self) -> Work:
        assert self._work is not None, "a step has begun"
        return self._work

    @property
    def _passing(self) -> Handovers:
        assert self._handovers is not None, "there are other stages"
        return self._handovers

    def _rows(self, microbatch: int) -> int:
        return self._working.rows(microbatch)

    def _backward_input(self, now: _Open) -> None:
        """The gradients of a chunk's inputs, and what its weights' need of that.

        An output that depends on no input, but on weights, would be left out: its backward pass is made whole.
        """
        gradients: list[Any] = [None] * len(now.outputs) if now.gradients is None else list(now.gradients)
        if self._follows is None or len(self._follows) != len(now.outputs):
            # A function of the layers, and walking their graph takes long.
            self._follows = [_depends(output, now.inputs) for output in now.outputs]
        pairs = list(zip(now.outputs, gradients, strict=True))
        alone = [pair for pair, follows in zip(pairs, self._follows, strict=True) if not follows]
        if alone:
            torch.autograd.backward([output for output, _ in alone], [gradient for _, gradient in alone])
        rest = [pair for pair, follows in zip(pairs, self._follows, strict=True) if follows]
        given = None if now.gradients is None else [gradient for _, gradient in rest]
        outputs = [output for output, _ in rest]
        _, now.groups = stage_backward_input(outputs, given, now.inputs, self.submod.parameters())

    def _up_to_the_end(self, work: Work, microbatch: int, batch: Any) -> Any:
        """Runs the loss up to where it calls the model; what this chunk's layers give then."""

        def run(*arguments: Any, **named: Any) -> NoReturn:
            raise _Handed(self.submod(*arguments, **named))

        try:
            work.loss(microbatch, _Stand(self.submod, run), batch)
        except _Handed as handed:
            return handed.output
        raise TrainingError("the loss never calls the model: there is nothing to cut into stages")

    def _take(self, microbatch: int) -> Tensors:
        if microbatch in self._given:
            return self._given.pop(microbatch)
        before = self.stage_index - 1
        tensors, takes_part = self._passing.take(before, microbatch, self._rows(microbatch), self._holders[before])
        if microbatch + 1 < self._count:
            # It comes while this one is computed.
            self.get_fwd_recv_ops(microbatch + 1)
        for value, needed in zip(tensors.values, takes_part, strict=True):
            value.requires_grad_(needed and torch.is_grad_enabled())
        return tensors

    def _take_gradients(self, microbatch: int) -> list[torch.Tensor]:
        if microbatch in self._returned:
            return self._returned.pop(microbatch)
        after = self._holders[self.stage_index + 1]
        taken = self._passing.take_gradients(self.stage_index, microbatch, self._rows(microbatch), after)
        if microbatch + 1 < self._count:
            self.get_bwd_recv_ops(microbatch + 1)
        return taken

    def _give_back(self, microbatch: int, inputs: list[torch.Tensor]) -> None:
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in inputs]
        before = self._holders[self.stage_index - 1]
        if before == self.group_rank:
            self._back[microbatch] = gradients
        else:
            self._passing.send_gradients(self.stage_index - 1, microbatch, gradients, before)

    def _keep(self, microbatch: int, opened: _Open) -> None:
        if torch.is_grad_enabled():
            self._open[microbatch] = opened
            self.most_open = max(self.most_open, len(self._open))


def _depends(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether an output of a graph depends on one of its leaves."""
    leaves = {id(value) for value in inputs}
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        waiting += [after for after, _ in node.next_functions]
    return False


class _Handed(BaseException):
    """Leaves the task's loss where it calls the model."""

    def __init__(self, output: Any) -> None:
        super().__init__("the model was called")
        self.output = output


class _Stand(nn.Module):
    """Stands for the whole model in the task's loss, which may call it once and look at nothing in it."""

    def __init__(self, layers: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.training = layers.training
        self._run = run
        self._called = False
        self._grad = torch.is_grad_enabled()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._called:
            raise TrainingError("the loss calls the model more than once, which is not possible with parallel.pipeline")
        self._called = True
        modes = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if modes or torch.is_grad_enabled() != self._grad:
            what = f"torch.autocast for {modes[0]}" if modes else "another gradient mode"
            raise TrainingError(
                f"the loss calls the model under {what}, which the stages of parallel.pipeline between the first and "
                "the last would not see: enter it in the layers' own forward"
            )
        return self._run(*arguments, **named)

    def named_modules(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("its modules")

    def named_children(self) -> Iterator[Any]:
        raise self._refusal("its modules")

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("its parameters")

    def named_buffers(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("its buffers")

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        raise self._refusal("its state")

    def __getattr__(self, name: str) -> Any:
        raise self._refusal(f"'{name}'")

    @staticmethod
    def _refusal(what: str) -> TrainingError:
        return TrainingError(
            f"the loss looks at {what} in the model, of which each stage of parallel.pipeline has a part: it may only "
            "call it"
        )
