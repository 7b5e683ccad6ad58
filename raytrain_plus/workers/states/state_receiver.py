"""Receive states from donors through Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_plus.errors import Interrupted
from raytrain_plus.state.transfer import Snapshot, snapshot_digest
from raytrain_plus.training.exchange.thread_control import Control

LOOK_S = 0.02
"""Seconds between two checks for a request, while a copy of the state is on its way."""


class ReceivedStates:
    """The donors' states, fetched on one thread while the training thread joins the generation, and then takes them."""

    def __init__(self, control: Control, store: Any = ray) -> None:
        """Begin without states; `store` has Ray's `wait` and `get`."""
        self._control = control
        self._store = store
        self._fetched: dict[int, Future[list[Snapshot]]] = {}
        """By generation."""

    def fetch(self, generation: int, references: Sequence[Any]) -> None:
        """Fetch the states that a member begins `generation` with, unless that generation is over."""
        if self._control.over(generation):
            return
        fetched = self._fetched.setdefault(generation, Future())
        try:
            fetched.set_result([self._received(generation, reference) for reference in references])
        except BaseException as error:
            fetched.set_exception(error)

    def take(self, generation: int, step: int) -> list[Snapshot]:
        """Wait for the parts of the state after `step`, and return them.

        Raises `Interrupted` if one does not arrive, or if this worker must leave meanwhile.
        """
        try:
            fetched = self._fetched.setdefault(generation, Future())
            while not fetched.done():
                self._control.check()
                wait([fetched], LOOK_S)
            snapshots = fetched.result()
        finally:
            # Nothing keeps the copy, and the object store's memory, once it is in place.
            self._fetched.clear()
        for snapshot in snapshots:
            if snapshot.step != step:
                raise Interrupted(f"the donor's state is of step {snapshot.step}, not {step}")
        return snapshots

    def _received(self, generation: int, reference: Any) -> Snapshot:
        """Return the donor's undamaged state. Raises `Interrupted` if it does not arrive."""
        while not self._store.wait([reference], timeout=LOOK_S)[0]:
            if self._control.over(generation):
                raise Interrupted("the group changes")
        try:
            snapshot: Snapshot = self._store.get(reference)
        except RayError as error:
            raise Interrupted(f"the donor's state did not arrive: {type(error).__name__}") from None
        if snapshot_digest(snapshot.step, snapshot.tensors, snapshot.values) != snapshot.digest:
            raise Interrupted("the donor's state arrived damaged")
        return snapshot
