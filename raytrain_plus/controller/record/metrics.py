"""Export a run's gauges through Ray, which offers them to Prometheus on nodes that export metrics.

Ray collects values every 10 s (`metrics_report_interval_ms`) and forgets a gauge that was not set for two such periods.
So all gauges are set repeatedly, and those of a worker or run that is gone need no removal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from ray.util.metrics import Gauge

from raytrain_plus.observe.gauges import OF_GPU, OF_RUN, OF_WORKER, GaugeValues

PERIOD_S = 1.0
"""Seconds between two updates."""

log = logging.getLogger(__name__)


class Metrics:
    """Sets gauges from the controller's thread: that costs 2 to 4 us each and never blocks."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare the gauges of the run of this name, which is a tag of every gauge."""
        self._run = run
        self._clock = clock
        self._due = -math.inf
        self._gauges: dict[str, Gauge] = {}

    @property
    def due(self) -> bool:
        """Whether it is time to update the gauges."""
        return self._clock() >= self._due

    def show(self, values: GaugeValues) -> None:
        """Set the run's gauges. If Ray does not take them, that is logged once and no more are set."""
        self._due = self._clock() + PERIOD_S
        try:
            for (name, tags), value in values.items():
                self._gauge(name).set(value, dict(zip(("worker", "stage"), tags, strict=False)))
        except Exception:
            self._due = math.inf
            log.warning("the run's metrics cannot be exported; the run continues without them", exc_info=True)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            what = {**OF_RUN, **OF_WORKER, **OF_GPU}[name]
            tags = () if name in OF_RUN else ("worker", "stage")
            self._gauges[name] = Gauge(name, what, ("run", *tags)).set_default_tags({"run": self._run})
        return self._gauges[name]
