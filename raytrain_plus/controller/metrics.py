"""A run's gauges, handed to Ray, which exports them where its nodes show metrics to Prometheus.

Ray collects what has been set every 10 s (`metrics_report_interval_ms`), and forgets a gauge that has not been set for
two such times. So all are set again and again, and what is gone - a worker, a run - need not be taken back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from ray.util.metrics import Gauge

from raytrain_plus.observe.gauges import OF_RUN, OF_WORKER, Figures

PERIOD_S = 1.0
"""Seconds between two showings."""

log = logging.getLogger(__name__)


class Metrics:
    """Shows figures from the controller's thread: that costs 2 to 4 us each, and waits for nobody."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`run`: its name, which is a tag of every gauge."""
        self._run = run
        self._clock = clock
        self._due = -math.inf
        self._gauges: dict[str, Gauge] = {}

    @property
    def due(self) -> bool:
        """Whether it is time to show figures again."""
        return self._clock() >= self._due

    def show(self, figures: Figures) -> None:
        """These are the run's figures now. Where Ray does not take them, that is said once, and no more are shown."""
        self._due = self._clock() + PERIOD_S
        try:
            for (name, tags), value in figures.items():
                self._gauge(name).set(value, dict(zip(("worker", "stage"), tags, strict=False)))
        except Exception:
            self._due = math.inf
            log.warning("the run's metrics cannot be shown; it goes on without", exc_info=True)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            what, tags = (OF_RUN[name], ()) if name in OF_RUN else (OF_WORKER[name], ("worker", "stage"))
            self._gauges[name] = Gauge(name, what, ("run", *tags)).set_default_tags({"run": self._run})
        return self._gauges[name]
