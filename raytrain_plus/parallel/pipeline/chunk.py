"""A chunk: consecutive layers at one position of a pipeline, as driven by torch's schedules.

The schedule decides when; a chunk computes and hands its result on. A whole model is one chunk. With several, the
task's loss runs on the first chunk up to its call of the model. It runs again, completely, on the last chunk, where the
model returns the output of all layers. So everything that a loss does before and after the model is done as in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from raytrain_plus.errors import TrainingError
from raytrain_plus.membership.slice_names import is_slice
from raytrain_plus.parallel.autocast import check_modes, open_modes
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.parallel.pipeline.transport import Handovers, Returned, Tensors, flattened
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.torch_compat import is_view


class Objective(NamedTuple):
    """What is backpropagated of a microbatch."""

    loss: torch.Tensor
    weight: Weight
    """By what its gradients are multiplied, in their buckets."""


class PassWork(Protocol):
    """The work of a model replica in one step: microbatches, numbered over all its shards."""

    def rows(self, microbatch: int) -> int:
        """Return the number of rows of a microbatch."""

    def batch(self, microbatch: int) -> Any:
        """Return the batch itself; called for the first and the last chunk."""

    def loss(self, microbatch: int, model: nn.Module, batch: Any) -> Any:
        """Return its `Objective`; called for the first and the last chunk. Without a backward pass, anything."""

    def computing(
        self, kind: Kind, chunk: int, microbatch: int, weight: Weight | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that is open while the chunk computes; it handles random numbers, buffers and interrupts.

        `weight`: that of the gradients which are added to those of the chunk's weights; None if none are.
        """


@dataclass(slots=True)
class _OpenPass:
    """A microbatch between its forward and its backward pass."""

    inputs: list[torch.Tensor]
    """The inputs that take part in the backward pass, as leaves."""
    outputs: list[torch.Tensor]
    """The outputs that take part in the backward pass; for the last chunk, the loss."""
    numbers: list[int]
    """The place of each of these among the outputs that can take part."""
    weight: Weight = 1.0
    """That of the gradients; comes with those of the outputs."""
    gradients: list[torch.Tensor] | None = None
    groups: list[dict[str, Any]] | None = None
    """The work left for the weights; None if there is none."""


class Chunk:
    """See the module docstring. Its public names are those that torch's schedules use (torch 2.13)."""

    def __init__(
        self,
        layers: nn.Module,
        index: int,
        holders: Sequence[int],
        handovers: Handovers | None = None,
        splits: bool = False,
        received: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
    ) -> None:
        """Make a chunk of `layers`, the chunk number `index` of the model.

        `holders`: for each chunk of the model, the stage that has it. `handovers`: the transfers to and from other
        stages, if any. `splits`: whether backward passes come in two parts. `received`: called with parameters that
        have got their gradient in the second part, which autograd does not accumulate itself.
        """
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
        self._received = received
        self._handovers = handovers
        self._work: PassWork | None = None
        self._count = 0
        self._follows: dict[int, bool] = {}
        """By the number of an output, whether it depends on an input."""
        self._open: dict[int, _OpenPass] = {}
        self._given: dict[int, Tensors] = {}
        """The inputs from another chunk of this stage."""
        self._returned: dict[int, Returned] = {}
        """The gradients returned by another chunk of this stage."""
        self._back: dict[int, Returned] = {}
        """The gradients for the previous chunk."""
        first = next(layers.children(), layers)
        self._writes = any(getattr(module, "inplace", False) for module in first.modules())
        names = [name for name, _ in layers.named_children() if not is_slice(name)]
        self._last_layer = f"the layer '{names[-1]}'" if names else "the model"

    def begin(self, work: PassWork, microbatches: int) -> None:
        """Begin a step and discard what an aborted earlier step has left."""
        self._work = work
        self._count = microbatches
        self.most_open = 0
        for kept in (self._open, self._given, self._returned, self._back):
            kept.clear()

    # The interface of torch's schedules. The lists of operations are empty: this class starts its own transfers and
    # waits for them.

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Start to receive activations."""
        if not self.is_first:
            before = self.stage_index - 1
            self._passing.expect("forward", before, microbatch, self._rows(microbatch), self._holders[before])
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        """Return no operations: the forward pass has sent its output."""
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Start to receive gradients."""
        if not self.is_last:
            after = self._holders[self.stage_index + 1]
            self._passing.expect("backward", self.stage_index, microbatch, self._rows(microbatch), after)
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        """Return no operations: the backward pass has sent its gradients."""
        return []

    def forward_one_chunk(self, microbatch: int, *unused: Any, **also_unused: Any) -> Any:
        """Run the forward pass of a microbatch; return its output, which is the loss on the last chunk."""
        given = None if self.is_first else self._take(microbatch)
        inputs = [value for value in given.values if value.requires_grad] if given is not None else []
        if given is not None and self._writes:
            # The first layer writes in place, which a leaf of a graph does not support.
            given = Tensors([value.clone() for value in given.values], given.tree)
        work, output = self._working, None
        batch = work.batch(microbatch) if self.is_first or self.is_last else None
        with work.computing("F", self.stage_index, microbatch):
            if self.is_last and given is not None:
                whole = given.whole()
                model = _ModelStandIn(self.submod, lambda *arguments, **named: self.submod(whole))
                output = work.loss(microbatch, model, batch)
            elif given is not None:
                output = self.submod(given.whole())
            elif self.is_last:
                output = work.loss(microbatch, self.submod, batch)
            else:
                output = self._up_to_the_end(work, microbatch, batch)
        if self.is_last:
            if torch.is_grad_enabled():
                # The task's own tensor stays as it is.
                loss = output.loss.clone() if self._splits else output.loss
                self._keep(microbatch, inputs, [loss], output.weight)
            return output
        tensors = flattened(output, self._last_layer)
        if self._splits:
            # The code for partial backward passes detaches outputs in place, which views do not support.
            tensors.values[:] = [value.clone() if is_view(value) else value for value in tensors.values]
        if torch.is_grad_enabled():
            self._keep(microbatch, inputs, [value for value in tensors.values if value.requires_grad])
        to = self._holders[self.stage_index + 1]
        if to != self.group_rank:
            rows = self._rows(microbatch)
            self._passing.send(self.stage_index, microbatch, rows, tensors, to, self._last_layer)
        return tensors

    def backward_one_chunk(
        self, microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a microbatch: completely, or for the chunk's input alone."""
        now = self._open[microbatch]
        if not self.is_last:
            # As in one process, no backward pass goes through an output that the loss does not depend on.
            gradients, now.weight = self._take_gradients(microbatch)
            found = zip(now.outputs, now.numbers, gradients, strict=True)
            given = [(output, number, gradient) for output, number, gradient in found if gradient is not None]
            now.outputs, now.numbers = [one[0] for one in given], [one[1] for one in given]
            now.gradients = [one[2] for one in given]
        elif isinstance(now.weight, torch.Tensor) and self._before_is_elsewhere:
            # Read before the backward pass is requested, whose end the host would wait for.
            now.weight = float(now.weight)
        if full_backward:
            with self._working.computing("B", self.stage_index, microbatch, now.weight):
                _backward(now)
            del self._open[microbatch]
        else:
            # If no input needs a gradient, the weights' part does everything.
            divided = bool(now.inputs and now.outputs)
            alone = divided and not all(self._follow(now))
            with self._working.computing("I", self.stage_index, microbatch, now.weight if alone else None):
                if divided:
                    self._backward_input(now)
        if not self.is_first:
            self._give_back(microbatch, now)

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool = False) -> None:
        """Run the rest of the backward pass of a microbatch: the gradients of the weights."""
        now = self._open.pop(microbatch)
        with self._working.computing("W", self.stage_index, microbatch, now.weight):
            if now.groups is None:
                _backward(now)
            else:
                # Loaded already by torch's schedules, which alone come here; a whole model need not load them.
                from torch.distributed.pipelining._backward import stage_backward_weight

                # From the last weights to the first, as in a complete pass: their sums start while the gradients of the
                # others are computed.
                seen: set[int] = set()
                for group in reversed(now.groups):
                    trained = list(_trained_by(group))
                    own = {id(value) for value in trained}
                    if own & seen:
                        # torch's code for partial passes finds it in two groups, and computes both wrongly.
                        raise TrainingError(
                            f"{self._last_layer}, or one before it on its stage, uses a weight twice, which the "
                            "zero-bubble schedule does not support; use another schedule"
                        )
                    seen |= own
                    stage_backward_weight((node.variable for node in group["params"]), [group])
                    self._received(trained)

    def set_local_fwd_input(self, given: Tensors, microbatch: int) -> None:
        """Take the input from another chunk of this stage."""
        # Each chunk's own graph ends at its input.
        values = [value.detach().requires_grad_(value.requires_grad) for value in given.values]
        self._given[microbatch] = Tensors(values, given.tree)

    def get_local_bwd_output(self, microbatch: int) -> Returned:
        """Return the gradients for another chunk of this stage."""
        return self._back.pop(microbatch)

    def set_local_bwd_input(self, returned: Returned, microbatch: int) -> None:
        """Take the gradients that another chunk of this stage returns."""
        self._returned[microbatch] = returned

    def perform_reduce_grad(self, scale: int) -> None:
        """Do nothing: gradients are summed over replicas elsewhere."""

    @property
    def _working(self) -> PassWork:
        assert self._work is not None, "a step has begun"
        return self._work

    @property
    def _passing(self) -> Handovers:
        assert self._handovers is not None, "there are other stages"
        return self._handovers

    def _rows(self, microbatch: int) -> int:
        return self._working.rows(microbatch)

    def _backward_input(self, now: _OpenPass) -> None:
        """Compute the gradients of a chunk's inputs, and what the gradients of its weights need of them.

        An output that depends on weights but on no input would be left out, so its backward pass is run completely.
        """
        gradients: list[Any] = [None] * len(now.outputs) if now.gradients is None else list(now.gradients)
        pairs = list(zip(now.outputs, gradients, self._follow(now), strict=True))
        alone = [(output, gradient) for output, gradient, follows in pairs if not follows]
        if alone:
            torch.autograd.backward([output for output, _ in alone], [gradient for _, gradient in alone])
        rest = [(output, gradient) for output, gradient, follows in pairs if follows]
        given = None if now.gradients is None else [gradient for _, gradient in rest]
        outputs = [output for output, _ in rest]
        # As for the weights.
        from torch.distributed.pipelining._backward import stage_backward_input

        _, now.groups = stage_backward_input(outputs, given, now.inputs, self.submod.parameters())

    def _follow(self, now: _OpenPass) -> list[bool]:
        """Return for each output whether it depends on an input."""
        for number, output in zip(now.numbers, now.outputs, strict=True):
            if number not in self._follows:
                # It depends only on the layers, and walking their graph is slow.
                self._follows[number] = _depends(output, now.inputs)
        return [self._follows[number] for number in now.numbers]

    def _up_to_the_end(self, work: PassWork, microbatch: int, batch: Any) -> Any:
        """Run the loss up to its call of the model; return the output of this chunk's layers."""

        def run(*arguments: Any, **named: Any) -> NoReturn:
            raise _ModelCalled(self.submod(*arguments, **named))

        try:
            work.loss(microbatch, _ModelStandIn(self.submod, run), batch)
        except _ModelCalled as handed:
            return handed.output
        raise TrainingError("the loss never calls the model, so no layer can run: call the model in Task.loss")

    def _take(self, microbatch: int) -> Tensors:
        if microbatch in self._given:
            return self._given.pop(microbatch)
        before = self.stage_index - 1
        tensors, takes_part = self._passing.take(before, microbatch, self._rows(microbatch), self._holders[before])
        if microbatch + 1 < self._count:
            # The next one arrives while this one is computed.
            self.get_fwd_recv_ops(microbatch + 1)
        for value, needed in zip(tensors.values, takes_part, strict=True):
            value.requires_grad_(needed and torch.is_grad_enabled())
        return tensors

    def _take_gradients(self, microbatch: int) -> Returned:
        if microbatch in self._returned:
            return self._returned.pop(microbatch)
        after = self._holders[self.stage_index + 1]
        taken = self._passing.take_gradients(self.stage_index, microbatch, self._rows(microbatch), after)
        if microbatch + 1 < self._count:
            self.get_bwd_recv_ops(microbatch + 1)
        return taken

    @property
    def _before_is_elsewhere(self) -> bool:
        """Whether another stage has the chunk before this one."""
        return not self.is_first and self._holders[self.stage_index - 1] != self.group_rank

    def _give_back(self, microbatch: int, now: _OpenPass) -> None:
        if self._before_is_elsewhere:
            before = self.stage_index - 1
            self._passing.send_gradients(before, microbatch, now.inputs, float(now.weight), self._holders[before])
        else:
            self._back[microbatch] = Returned([value.grad for value in now.inputs], now.weight)

    def _keep(
        self, microbatch: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor], weight: Weight = 1.0
    ) -> None:
        self._open[microbatch] = _OpenPass(inputs, outputs, list(range(len(outputs))), weight)
        self.most_open = max(self.most_open, len(self._open))


def _backward(now: _OpenPass) -> None:
    """Run the complete backward pass of a microbatch, if anything depends on it."""
    if now.outputs:
        torch.autograd.backward(now.outputs, now.gradients)


def _trained_by(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters to which `stage_backward_weight` will give a gradient."""
    if any(gradient is not None for gradients in group["grads"] for gradient in gradients):
        yield from (node.variable for node in group["params"])


def _depends(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an output of a graph depends on one of its leaves."""
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


class _ModelCalled(BaseException):
    """Leaves the task's loss at its call of the model."""

    def __init__(self, output: Any) -> None:
        super().__init__("the model was called")
        self.output = output


class _ModelStandIn(nn.Module):
    """Replaces the whole model in the task's loss, which may call it once and access nothing in it."""

    def __init__(self, layers: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.training = layers.training
        self._run = run
        self._called = False
        self._grad = torch.is_grad_enabled()
        self._modes = open_modes()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._called:
            raise TrainingError(
                "the loss calls the model more than once; with parallel.pipeline or sharded: full it may call it once"
            )
        self._called = True
        check_modes(self._modes)
        if torch.is_grad_enabled() != self._grad:
            raise TrainingError(
                "the loss calls the model under a different gradient mode, which does not reach the middle layers with "
                "parallel.pipeline or sharded: full: enter it in the layers' own forward"
            )
        return self._run(*arguments, **named)

    def named_modules(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("the modules")

    def named_children(self) -> Iterator[Any]:
        raise self._refusal("the modules")

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("the parameters")

    def named_buffers(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        raise self._refusal("the buffers")

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        raise self._refusal("the state")

    def __getattr__(self, name: str) -> Any:
        raise self._refusal(f"'{name}'")

    @staticmethod
    def _refusal(what: str) -> TrainingError:
        return TrainingError(
            f"the loss accesses {what} of the model, but with parallel.pipeline or sharded: full only a part of it is "
            "there at a time: the loss may only call the model"
        )
