"""Classify Ray addresses and build the authentication error. Pure, except that it reads the environment."""

from __future__ import annotations

import os

from raytrain_plus.errors import InputError
from raytrain_plus.storage.address import refuse_credentials

HERE = "http://127.0.0.1:8265"
"""Dashboard URL of a head node on this machine."""


def check_cluster(address: str) -> None:
    """Raise `InputError` if the address of a Ray cluster contains a credential; error messages and hints repeat it."""
    # The address of a head node has no scheme.
    full = address if "://" in address else f"http://{address}"
    refuse_credentials(full, "address", "remove it; put the cluster's token into ~/.ray/auth_token")


def is_dashboard(address: str | None) -> bool:
    """Return whether the address is a dashboard URL, to which any machine can submit jobs."""
    return (address or "").startswith(("http://", "https://"))


def is_join(address: str) -> bool:
    """Return whether the address is that of a head node, which only a machine of the cluster can join."""
    return not is_dashboard(address) and not address.startswith("ray://")


def dashboard_of(wanted: str | None) -> str:
    """Return the URL of the cluster's dashboard: `wanted`, else the environment's, else this machine's.

    Raises `InputError` if it is another kind of address, or contains a credential.
    """
    given = wanted or _environments() or HERE
    check_cluster(given)
    if not is_dashboard(given):
        raise InputError("not the address of a dashboard", where=f"address: {given}", expected=f"a URL such as {HERE}")
    return given


def authentication_failed(address: str, why: str) -> InputError:
    """Return the error for a cluster that requires a token and got none or a wrong one; `why` is Ray's message."""
    return InputError(
        f"authentication failed; the cluster requires a valid token: {why.splitlines()[0]}",
        where=f"address: {address}",
        remedy="put the cluster's token into ~/.ray/auth_token, or name its file (RAY_AUTH_TOKEN_PATH=FILE), and "
        "export RAY_AUTH_MODE=token",
    )


def named_dashboard() -> str | None:
    """Return the dashboard URL that the environment names; None if it names none.

    Raises `InputError` if the environment's address contains a credential.
    """
    named = _environments()
    check_cluster(named or "")
    return named if is_dashboard(named) else None


def _environments() -> str | None:
    return os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
