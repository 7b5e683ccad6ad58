"""Show the plans of a job: a table, a row for each number of workers, and the reasons where a choice changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_plus.job.settings import Job
from raytrain_plus.planner.layer_profile import ModelProfile
from raytrain_plus.planner.plan_table import NoPlan, PlanTable, SizePlan, mode_text, shape_text
from raytrain_plus.storage.size_text import size_text

_HEAD = ("workers", "shape", "sharded", "recompute", "offload", "schedule", "microbatches", "memory", "step", "compute",
         "bubble", "sums", "rest", "samples/s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The answer of `raytrain plan`."""

    name: str
    job: Job
    table: PlanTable
    profile: ModelProfile
    proposals: tuple[str, ...]
    """What would change the result, in sentences."""
    where: str
    """The machines, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        link = self.profile.link
        return {
            "name": self.name,
            "machines": self.where,
            "link": {"latency_s": link.latency_s, "bytes_per_s": link.per_s},
            "plans": [row.to_json() for row in self.table.rows],
            "proposals": list(self.proposals),
        }

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        link = self.profile.link
        said = [
            f"{self.name}: the fastest plan that fits, by the cost of its layers on this machine",
            f"  {self.where}; links of {1e6 * link.latency_s:.0f} us and {size_text(int(link.per_s))}/s, as between "
            "processes here",
            "  shape: replicas x stages x workers that share slices",
            "",
        ]
        planned = [row for row in self.table.rows if isinstance(row, SizePlan)]
        known = [
            ("MFU", all(row.mfu is not None for row in planned)),
            ("$/epoch", all(row.dollars is not None for row in planned)),
        ]
        shown = [name for name, there in known if there and planned]
        said += [f"  {line}" for line in _aligned([[*_HEAD, *shown], *(self._cells(row, shown) for row in planned)])]
        said += [f"  {row.workers}: cannot work: {row.missing}" for row in self.table.rows if isinstance(row, NoPlan)]
        said += ["", *self._reasons(planned)]
        missing = [name for name, there in known if not there]
        if missing and planned:
            said.append(f"  without {' and '.join(missing)}: the peak of the devices, or their price, is not known")
        if self.job.workers.gpus:
            said.append("  times are those of this machine's CPU; the memory is that of GPUs")
        return said + [f"  would change the result: {one}" for one in self.proposals]

    def _cells(self, row: SizePlan, shown: Sequence[str]) -> list[str]:
        settings, shape, time = row.choice.settings, row.choice.shape, row.cost.time
        also = {
            "MFU": "" if row.mfu is None else f"{100 * row.mfu:.1f} %",
            "$/epoch": "" if row.dollars is None else f"{row.dollars:.2f}",
        }
        return [
            str(row.workers),
            shape_text(shape),
            settings.sharded,
            mode_text(settings.recompute),
            settings.offload,
            settings.schedule if shape.stages > 1 else "-",
            str(self.job.parallel.microbatches),
            size_text(row.cost.memory.total),
            *(f"{1000 * seconds:.1f} ms" for seconds in (time.total, time.compute, time.bubble, time.sums, time.rest)),
            f"{row.samples_per_s:,.1f}",
            *(also[name] for name in shown),
        ]

    def _reasons(self, planned: Sequence[SizePlan]) -> Iterator[str]:
        """Yield the reason and the runner-up of each size at which the choice, or the reason, changes."""
        before = None
        for row in planned:
            here = (row.choice, row.reason)
            if here != before:
                yield f"  {row.workers}: {row.reason}"
                if row.runner_up:
                    yield f"     next best: {row.runner_up}"
            before = here


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
