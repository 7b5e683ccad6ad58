"""Classify Ray addresses and build the authentication error. Pure, but for the environment."""

from __future__ import annotations

import os

from raytrain_plus.errors import InputError
from raytrain_plus.storage.address import refuse_credentials

HERE = "http://127.0.0.1:8265"
"""Of the dashboard of a head on this machine."""


def check_cluster(address: str) -> None:
    """Raise `InputError` if the address of a Ray cluster contains a credential; error messages and hints repeat it."""
    # The address of a head has no scheme.
    full = address if "://" in address else f"http://{address}"
    refuse_credentials(full, "address", "remove it; a cluster's token belongs into ~/.ray/auth_token")


def is_dashboard(address: str | None) -> bool:
    """Whether it is that of a cluster's dashboard, whom jobs are sent to from anywhere."""
    return (address or "").startswith(("http://", "https://"))


def is_join(address: str) -> bool:
    """Whether it is that of a cluster's head, whom a machine of the cluster joins."""
    return not is_dashboard(address) and not address.startswith("ray://")


def dashboard_of(wanted: str | None) -> str:
    """The address of the cluster's dashboard: the one that is wanted, or the environment's, or this machine's.

    Raises `InputError` where it is another kind of address, or contains a credential.
    """
    given = wanted or _environments() or HERE
    check_cluster(given)
    if not is_dashboard(given):
        raise InputError("is not the address of a dashboard", where=f"address: {given}", expected=HERE)
    return given


def not_let_in(address: str, why: str) -> InputError:
    """What is said where the cluster asks for a token and was shown none, or a wrong one; `why` is Ray's word."""
    return InputError(
        f"the cluster asks for a token, and is not content with what it got: {why.splitlines()[0]}",
        where=f"address: {address}",
        remedy="put the cluster's token into ~/.ray/auth_token, or name its file (RAY_AUTH_TOKEN_PATH=FILE), and "
        "export RAY_AUTH_MODE=token",
    )


def named_dashboard() -> str | None:
    """The address of the dashboard that the environment names, where it does. Raises `InputError` as `dashboard_of`."""
    named = _environments()
    check_cluster(named or "")
    return named if is_dashboard(named) else None


def _environments() -> str | None:
    return os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
