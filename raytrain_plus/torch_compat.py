"""The only module that reads torch's private attributes; tested with torch 2.13.

`parallel/pipeline/chunk` and `schedule` import torch's pipelining modules themselves, because these load slowly.
"""

# torch has no complete annotations for its C++ exports.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

pytree = _pytree
"""Trees of tensors: flattening, and the types of their nodes."""


DEAR_OPERATIONS = frozenset(
    operation.default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (operation := getattr(torch.ops.aten, name, None)) is not None
)
"""Operations that take more time than their results take memory: matrix products, convolutions and attention."""


_CLAMPED_TOGETHER = 64 << 20
"""Maximum bytes that are clamped at a time: as much memory is needed beside them."""
_NORM_PART = 1 << 16
"""Numbers that a norm on a CPU converts at a time."""


def write_count(tensor: torch.Tensor) -> int:
    """Return how often the tensor's values have been written in place."""
    return tensor._version


def function_modes() -> int:
    """Return how many modes see this thread's calls of torch, such as that of `with torch.device(...)`."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


def keep_write_counts(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which in-place changes of these tensors are not counted."""
    return _unsafe_preserve_version_counter(tensors)


def upper_bound(program: torch.export.ExportedProgram, size: torch.SymInt) -> int | None:
    """Return the largest value of a size that varies in an exported program; None if it has none."""
    bounds = program.range_constraints.get(size.node.expr)
    # Without a bound it is torch's own infinity of integers.
    return int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd treats the tensor as a view of another one."""
    return tensor._is_view()


def float64_norms(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the norm of each tensor, with few kernels; all must have the same device and dtype."""
    large = [
        number
        for number, tensor in enumerate(tensors)
        if tensor.numel() > _NORM_PART and tensor.device.type == "cpu" and tensor.dtype != torch.float64
    ]
    if not large:
        return tuple(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
    part = torch.empty(_NORM_PART, dtype=torch.float64)
    found = {number: _float64_norm(tensors[number], part) for number in large}
    small = [number for number in range(len(tensors)) if number not in found]
    if small:
        found |= zip(
            small, torch._foreach_norm([tensors[number] for number in small], 2, dtype=torch.float64), strict=True
        )
    return tuple(found[number] for number in range(len(tensors)))


def _float64_norm(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a norm by way of `part`, a buffer that stays in the cache; torch would convert the whole tensor."""
    total = torch.zeros((), dtype=torch.float64)
    for values in tensor.reshape(-1).split(len(part)):
        converted = part[: len(values)].copy_(values)
        total += converted.dot(converted)
    return total.sqrt_()


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, by few kernels; dtypes may differ."""
    alike: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        # One kernel copies tensors of one dtype to one other.
        kind = target.device, target.dtype, source.device, source.dtype
        into, values = alike.setdefault(kind, ([], []))
        into.append(target)
        values.append(source)
    for into, values in alike.values():
        torch._foreach_copy_(into, values)


def clamp_each(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """Clamp each number of some tensors to [-limit, limit], in place; what is not finite becomes NaN.

    Of complex numbers both parts are clamped.
    """
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    while real:
        size, count = 0, 0
        while count < len(real) and (not count or size + real[count].nbytes <= _CLAMPED_TOGETHER):
            size += real[count].nbytes
            count += 1
        some, real = real[:count], real[count:]
        zeros = torch._foreach_mul(some, 0.0)
        torch._foreach_clamp_min_(some, -limit)
        torch._foreach_clamp_max_(some, limit)
        torch._foreach_add_(some, zeros)


def add_each(targets: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
    """Add to each target its number, by few kernels."""
    torch._foreach_add_(list(targets), list(numbers))


def sum_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add to each target its source, by few kernels."""
    torch._foreach_add_(list(targets), list(sources))


def largest_each(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the largest magnitude of each tensor, none of which is empty, by few kernels; NaN if a value is NaN."""
    return tuple(torch._foreach_norm(list(tensors), math.inf)) if tensors else ()


def lerp_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], weight: float) -> None:
    """Move each target by this share of the way to its source, by few kernels."""
    torch._foreach_lerp_(list(targets), list(sources), weight)


def put_parameter(module: nn.Module, name: str, value: nn.Parameter) -> None:
    """Replace the module's own parameter `name`."""
    module._parameters[name] = value


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module also calls something that was registered with it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a backward pass calls something that was registered with the module, or its own parameters."""
    of_parameters = any(value._backward_hooks for value in module.parameters(recurse=False))
    return bool(module._backward_hooks or module._backward_pre_hooks) or of_parameters


def has_accumulated_hooks(parameter: nn.Parameter) -> bool:
    """Return whether something is called after each gradient has been added to that of the parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers, by name: what it uses, not a copy."""
    found: dict[str, torch.Tensor | None] = module._buffers
    return found


def transient_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return those of the module's own buffers that are not persistent, by name."""
    return {name: value for name, value in module._buffers.items() if name in module._non_persistent_buffers_set}


def without_values(module: nn.Module) -> nn.Module:
    """Return a module that shares all with another one but its own parameters, which are empty."""
    found = copy.copy(module)
    found._parameters = {
        name: None if value is None else nn.Parameter(value.new_empty(0)) for name, value in module._parameters.items()
    }
    return found


def buffer_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the module's own buffer `name`; the module's attribute access may be overridden."""
    return module._buffers[name]


def put_buffer(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Replace the module's own buffer `name`."""
    module._buffers[name] = value


def gloo_options(address: str, connect_s: float) -> Any:
    """Return options for a Gloo group that listens at `address`; each connection may take `connect_s`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=connect_s)
    return options


def run_schedule(schedule: Any, microbatches: int) -> None:
    """Run a pipeline schedule whose stages provide their own inputs and keep their own outputs."""
    nothing: list[Any] = [()] * microbatches
    schedule._step_microbatches(nothing, None, [None] * microbatches, None, False)


@contextmanager
def counting_operations() -> Iterator[Callable[[], int]]:
    """Open a context that counts the operations of matrix products, convolutions and attention, forward and backward.

    Yields a function that returns the count so far.
    """
    counter: Any = FlopCounterMode(display=False)
    # Otherwise it looks into every module that is called, which a stage's stand-in for the model refuses.
    counter.mod_tracker = _NoModules()
    aten, formulas = torch.ops.aten, counter.flop_registry
    # torch counts attention on GPUs only; on CPUs the operations have the same first arguments.
    formulas[aten._scaled_dot_product_flash_attention_for_cpu] = formulas[aten._scaled_dot_product_flash_attention]
    formulas[aten._scaled_dot_product_flash_attention_for_cpu_backward] = formulas[
        aten._scaled_dot_product_flash_attention_backward
    ]
    formulas[aten._grouped_mm] = _grouped_operations
    libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled = [library.enabled for library in libraries]
    try:
        for library in libraries:
            # Their recurrent layers would hide matrix products.
            library.enabled = False
        with counter:
            yield counter.get_total_flops
    finally:
        for library, before in zip(libraries, enabled, strict=True):
            library.enabled = before


def _grouped_operations(rows: Any, others: Any, *_: Any, **__: Any) -> int:
    """Return the operations of `grouped_mm`: (rows, in) with (groups, in, out), or of its backward pass."""
    return int(2 * rows.shape[0] * rows.shape[1] * others.shape[-1])


class _NoModules(nullcontext[None]):
    """Replaces torch's record of the modules that are running: everything counts together."""

    parents = ("Global",)

    def __exit__(self, *error: object) -> None:
        pass


def set_up_compiler(codes: int) -> None:
    """Let torch compile one function up to `codes` times in this process, and fail rather than stop compiling."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, codes)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 8 * codes)
    dynamo.fail_on_recompile_limit_hit = True
    # It warns of in-place operations whether there are any or not; those are right, which a test shows.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Without processes of the compiler's own, none is left when this one is killed.
    inductor.compile_threads = 1


def graph_breaks() -> list[str]:
    """Return why torch has left operations of compiled functions uncompiled, in this process so far."""
    from torch._dynamo.utils import counters

    return list(counters["graph_break"])


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class CreatedStorages(TorchDispatchMode):
    """A context that follows the memory which operations of this thread allocate for their results."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the storages of its results."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A view of what was given is no new memory.
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def living(self) -> int:
        """Return the bytes of those that still exist."""
        return sum(size for storage, size in self._made.values() if not storage.expired())


def _storages(values: Any) -> list[Any]:
    return [value.untyped_storage() for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
