"""Send stop and rescale requests to the controller of a running run."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_plus.errors import InputError, RunError
from raytrain_plus.launch.cluster import NAMESPACE, joined
from raytrain_plus.runs.folder import held_at
from raytrain_plus.storage.interface import Folder

ANSWER_S = 10.0
"""Maximum seconds for a controller's answer."""


def stop(run: Folder, address: str | None = None) -> None:
    """Ask the run in this folder to stop at the next step boundary; return once its controller has the request.

    `address`: the run's Ray cluster, if the address that the run recorded cannot be reached from here. Raises
    `InputError` if the run is not running, and `RunError` if its controller does not answer.
    """
    _wish(run, address, "stop")


def rescale(
    run: Folder,
    minimum: int | None = None,
    maximum: int | None = None,
    spares: int | None = None,
    address: str | None = None,
) -> None:
    """Ask the run in this folder for other numbers of workers; None leaves a number unchanged.

    A run that is later resumed from its folder uses the numbers of its job again. Raises as `stop` does, and
    `InputError` if the job does not support these numbers.
    """
    _wish(run, address, "rescale", minimum, maximum, spares)


def _wish(run: Folder, address: str | None, what: str, *arguments: Any) -> None:
    holder = held_at(run)
    if holder is None:
        raise InputError("the run is not running", where=run.where, remedy="see how it ended: raytrain status RUN")
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
