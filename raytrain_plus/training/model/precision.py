"""The format of the numbers in forward and backward passes: `precision` in the job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job import setting_types
from raytrain_plus.parallel.autocast import Modes
from raytrain_plus.state.named import dtype_name

_AMPERE = 8
"""The major compute capability of the first GPUs that have TF32."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a `precision` means for one device."""

    name: setting_types.Precision = "fp32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def computed_in(self) -> torch.dtype | None:
        """The dtype of autocast; None if the passes compute in the dtypes of the model."""
        if self.name == "fp16":
            return torch.float16
        return torch.bfloat16 if self.name in ("bf16", "bf16-params") else None

    @property
    def modes(self) -> Modes:
        """What `open_modes` returns in a pass."""
        return () if self.computed_in is None else ((self.device.type, self.computed_in),)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would vanish unless the loss is scaled."""
        return self.name == "fp16"

    @property
    def has_masters(self) -> bool:
        """Whether the model's weights are copies of those that the optimizer changes; see `masters`."""
        return self.name == "bf16-params"

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context for forward passes, with the loss."""
        if self.computed_in is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.computed_in)

    def set_up(self) -> None:
        """Prepare this process. Raises `InputError` if its device cannot compute in this format."""
        if self.name != "tf32":
            return
        major = torch.cuda.get_device_capability(self.device)[0]
        if major < _AMPERE:
            raise InputError(
                f"{torch.cuda.get_device_name(self.device)} has no TF32",
                where="precision: tf32",
                expected="a GPU of NVIDIA's Ampere generation or later",
                remedy="set precision to fp32 or fp16",
            )
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def parameter_bytes(self, value: nn.Parameter, copies: int) -> int:
        """Return the bytes that a worker keeps for a parameter; `copies`: how many, if it trains the parameter.

        They are float32 copies beside a bfloat16 parameter that has a master.
        """
        if self.has_masters and value.requires_grad and value.dtype == torch.bfloat16:
            return value.nbytes + copies * value.numel() * torch.float32.itemsize
        return value.nbytes * (copies if value.requires_grad else 1)

    def check_parameters(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise `TaskError` for parameters that are not the float32 numbers which this format needs."""
        if not (self.scales_loss or self.has_masters):
            return
        for name, value in named:
            if value.requires_grad and value.dtype in (torch.float16, torch.bfloat16):
                raise TaskError(
                    f"the parameter '{name}' is {dtype_name(value.dtype)}, but the weights that the "
                    "optimizer changes must keep more digits",
                    where=f"precision: {self.name}",
                    expected="float32 parameters; the passes compute in 16 bits all the same",
                    remedy="build the model in float32",
                )


FP32 = Precision()
"""The numbers of the model."""
