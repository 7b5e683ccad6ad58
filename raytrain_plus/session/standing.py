"""Where a run stands in the step that is being computed, as a training function sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import TaskError
from raytrain_plus.task import RunFacts


class Standing:
    """Set by the run before each step."""

    # Without a dict of attributes, in which a trial would look for what a step changes.
    __slots__ = ("_facts", "held_out", "remembered", "steps", "stops")

    def __init__(self) -> None:
        self._facts: RunFacts | None = None
        self.steps = 0
        """The steps that were made before this one."""
        self.remembered: Mapping[str, Any] = {}
        """What was remembered after the step before."""
        self.stops = False
        """Whether the function has asked in this step that the run stops."""
        self.held_out = False
        """Whether the batch is a held-out one."""

    @property
    def facts(self) -> RunFacts:
        """What is known of the run. Raises `TaskError` outside a run."""
        if self._facts is None:
            raise TaskError("this is known in a run alone", remedy="in a test of your own, set task.run first")
        return self._facts

    @facts.setter
    def facts(self, facts: RunFacts) -> None:
        self._facts = facts
