"""Requests that a running run takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Stop at the next step boundary and save the state."""


@dataclass(frozen=True, slots=True)
class RescaleRequest:
    """Use other numbers of workers; None leaves a number unchanged.

    A run that is later resumed from its folder uses the numbers of its job again.
    """

    minimum: int | None = None
    maximum: int | None = None
    spares: int | None = None


Request = StopRequest | RescaleRequest
