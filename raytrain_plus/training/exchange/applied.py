"""A step that changed the state, as a worker knows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from raytrain_plus.observe.expert_use import ExpertUse
from raytrain_plus.training.exchange.header import Flags, StepTotals
from raytrain_plus.training.exchange.step_records import Remark


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A step that changed the state."""

    rows: int
    loss: float
    flags: Flags
    """The flags that members raised at this boundary."""
    notes: bytes
    """Each shard's contribution for the ledger: `data.ledger.ledger.NOTE`s in shard order."""
    skipped_rows: bytes = b""
    """The rows that were left out, of all shards: `data.ledger.ledger.SKIPPED`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The means of what the loss returned beside it."""
    grad_norm: float
    """Global norm of the gradient before clipping; NaN or infinite if the step was skipped for it."""
    skipped: bool = False
    """Sums were not finite: weights, optimizer, scheduler and buffers are unchanged."""
    lr: tuple[float, ...] = ()
    """The learning rate of each parameter group in this step; empty if this worker's optimizer has none."""
    remarks: tuple[Remark, ...] = ()
    experts: Mapping[str, ExpertUse] = field(default_factory=dict)
    """How the layers with experts that are held here have used them, over all shards."""
    reduce_s: float = field(compare=False)
    """Seconds of waiting for the sums after this worker's own part; ignored in comparisons of results."""

    @classmethod
    def of(
        cls,
        totals: StepTotals,
        grad_norm: float,
        reduce_s: float,
        lr: tuple[float, ...],
        remarks: tuple[Remark, ...] = (),
        *,
        skipped: bool = False,
        experts: Mapping[str, ExpertUse] = MappingProxyType({}),
    ) -> Applied:
        """Return the step with these totals in its header."""
        return cls(
            rows=totals.rows,
            loss=totals.loss,
            flags=totals.flags,
            notes=totals.notes,
            skipped_rows=totals.skipped_rows,
            metrics=totals.metrics,
            grad_norm=grad_norm,
            skipped=skipped,
            lr=lr,
            remarks=remarks,
            experts=experts,
            reduce_s=reduce_s,
        )
