"""Send stop and rescale requests to the controller of a running run."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_plus.errors import InputError, RunError, first_line
from raytrain_plus.launch.cluster import joined
from raytrain_plus.launch.request import Request, StopRequest
from raytrain_plus.runs.folder import held_at
from raytrain_plus.storage.interface import Folder
from raytrain_plus.workers.run_actors import NAMESPACE

ANSWER_S = 10.0
"""Maximum seconds for a controller's answer."""


def send(run: Folder, request: Request, address: str | None = None) -> str | None:
    """Send a request to the run in this folder, and return what its controller says of its effect, if anything.

    `address`: the run's Ray cluster, if the address that the run recorded cannot be reached from here. It joins that
    cluster, so this process must not be connected to one. Raises `InputError` if the run is not running or its job
    does not support the request, and `RunError` if its controller does not answer.
    """
    holder = held_at(run)
    if holder is None:
        raise InputError("the run is not running", where=run.where, remedy="see how it ended: raytrain status RUN")
    address = address or holder.address
    with joined(address, token=holder.token):
        try:
            actor = ray.get_actor(holder.controller, namespace=NAMESPACE)
            said: str | None = ray.get(_call(actor, request), timeout=ANSWER_S)
            return said
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, ValueError) as error:
            raise RunError(
                f"the controller of the run in {run.where} does not answer at {address}: {first_line(error)}"
            ) from None


def _call(controller: Any, request: Request) -> Any:
    if isinstance(request, StopRequest):
        return controller.stop.remote()
    return controller.rescale.remote(request.minimum, request.maximum, request.spares)
