"""Wishes to a run that goes on by itself, brought to its controller."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_plus.errors import InputError, RunError
from raytrain_plus.launch.cluster import NAMESPACE, joined
from raytrain_plus.runs.folder import held_at
from raytrain_plus.storage.interface import Folder

ANSWER_S = 10.0
"""Limit of a controller's answer."""


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
    holder = held_at(run)
    if holder is None:
        raise InputError("the run is not going on", where=run.where, remedy="see how it ended: raytrain status RUN")
    address = address or holder.address
    with joined(address, token=holder.token):
        try:
            controller = ray.get_actor(holder.controller, namespace=NAMESPACE)
            ray.get(getattr(controller, what).remote(*arguments), timeout=ANSWER_S)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise RunError(f"the controller of the run in {run.where} does not answer at {address}: {why}") from None
