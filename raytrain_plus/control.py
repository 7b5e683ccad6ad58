"""Wishes to a run that goes on by itself, brought to its controller."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raytrain_plus.cluster import ANSWER_S, controllers_of, joined
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.runfolder import lease_address
from raytrain_plus.storage.folder import Folder, split


def stop(run: Folder, address: str | None = None) -> None:
    """Asks the run in this folder to stop at the next step boundary; returns when its controller has heard.

    `address`: of its Ray cluster, where the one that the run knows is not to be reached from here. Raises `InputError`
    where the run is not going on, and `RunError` where its controller does not answer.
    """
    _wish(run, address, "stop")


def rescale(
    run: Folder,
    minimum: int | None = None,
    maximum: int | None = None,
    spares: int | None = None,
    address: str | None = None,
) -> None:
    """The same for other numbers of workers; what is None stays. Raises `InputError` where its job does not bear them.

    A run that goes on later, from its folder, has those of its job again.
    """
    _wish(run, address, "rescale", minimum, maximum, spares)


def _wish(run: Folder, address: str | None, what: str, *arguments: Any) -> None:
    known = lease_address(run)
    if known is None:
        raise InputError("the run is not going on", where=run.where, remedy="see how it ended: raytrain status RUN")
    address, token = address or known[0], known[1]
    with joined(address, token=token):
        for controller in controllers_of(split(run.address)[1]):
            with contextlib.suppress(GetTimeoutError, RayActorError):
                if ray.get(controller.folder.remote(), timeout=ANSWER_S) == run.where:
                    try:
                        ray.get(getattr(controller, what).remote(*arguments), timeout=ANSWER_S)
                    except RayTaskError as error:
                        raise error.cause from None
                    return
    raise RunError(f"the controller of the run in {run.where} does not answer at {address}")
