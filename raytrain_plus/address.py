"""What the address of a Ray cluster is the address of. Pure, but for the environment."""

from __future__ import annotations

import os

from raytrain_plus.errors import InputError

HERE = "http://127.0.0.1:8265"
"""Of the dashboard of a head on this machine."""


def is_dashboard(address: str | None) -> bool:
    """Whether it is that of a cluster's dashboard, whom jobs are sent to from anywhere."""
    return (address or "").startswith(("http://", "https://"))


def is_join(address: str) -> bool:
    """Whether it is that of a cluster's head, whom a machine of the cluster joins."""
    return not is_dashboard(address) and not address.startswith("ray://")


def dashboard_of(wanted: str | None) -> str:
    """The address of the cluster's dashboard: the one that is wanted, or the environment's, or this machine's.

    Raises `InputError` where it is another kind of address.
    """
    given = wanted or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or HERE
    if not is_dashboard(given):
        raise InputError("is not the address of a dashboard", where=f"address: {given}", expected=HERE)
    return given
