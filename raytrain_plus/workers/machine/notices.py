"""Listen for the cloud's preemption notice for this node and pass it to Ray; the controller does the rest.

Each worker listens in its own process: a separate actor on an otherwise empty node would keep an autoscaler from ever
releasing the node. Nothing here stops or slows a run: failures are logged and retried.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

from raytrain_plus.ray_compat import drain_this_node
from raytrain_plus.workers.machine.spot import FIRMWARE, LOOK_S, SERVICE, Cloud, MetadataAnswer, Request, cloud_of, look

ANSWER_S = 5.0
"""Maximum seconds of each wait for a metadata service."""
LONGEST = 1 << 16
"""Maximum bytes of an answer that are read."""
SILENT = 30
"""Number of consecutive failures before a warning: Azure may take two minutes to its first answer."""

log = logging.getLogger(__name__)


def hear_notices() -> None:
    """Start listening on a thread if this machine belongs to a known cloud; otherwise nothing is contacted.

    Call this once, after everything that adds variables to the environment: see `load_horovod`.
    """
    cloud = cloud_of({name: _firmware(name) for name in FIRMWARE})
    if cloud is not None:
        threading.Thread(target=listen, args=(cloud, SERVICE, drain_this_node), name="notices", daemon=True).start()


def listen(
    cloud: Cloud,
    service: tuple[str, int],
    drain: Callable[[str, float], bool | None],
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Poll until the machine is to go and `drain` has accepted the reason and the time in Unix seconds.

    `drain` returns whether it accepted, or None if it never will; `wait` is called between two polls.
    """
    goes: float | None = None
    failed = 0
    while True:
        try:
            told = ask(cloud, service)
            failed = 0
            # GCP's notice has no time, and each poll would postpone it.
            goes = min((when for when in (goes, told) if when is not None), default=None)
        except Exception as error:
            failed += 1
            if failed == SILENT:
                log.warning("a preemption notice from %s would be missed: %s; trying again", cloud, error)
        if goes is not None and _handed_on(cloud, goes, drain):
            return
        wait(LOOK_S)


def ask(cloud: Cloud, service: tuple[str, int]) -> float | None:
    """Return when the machine goes, in Unix seconds; None without a notice. Raises if the answer is invalid."""
    asking = look(cloud, time.time())
    request = next(asking)
    while True:
        answer = _answer(service, request)
        try:
            request = asking.send(answer)
        except StopIteration as end:
            goes: float | None = end.value
            return goes


def _answer(service: tuple[str, int], request: Request) -> MetadataAnswer:
    # No proxy, whatever the environment says: it would ask its own machine's service.
    with contextlib.closing(HTTPConnection(*service, timeout=ANSWER_S)) as connection:
        connection.request(request.method, request.path, headers=dict(request.headers))
        response = connection.getresponse()
        return MetadataAnswer(response.status, response.read(LONGEST).decode())


def _handed_on(cloud: Cloud, goes: float, drain: Callable[[str, float], bool | None]) -> bool:
    """Pass a notice on to Ray; return whether nothing is left to do."""
    try:
        taken = drain(f"{cloud} preempts it", goes)
    except Exception:
        # Ray's own head may be unreachable for a moment.
        log.warning("%s preempts this node, and Ray cannot be told; trying again", cloud, exc_info=True)
        return False
    if taken:
        log.warning("%s preempts this node in %.0f s", cloud, goes - time.time())
    return taken is not False


def _firmware(name: str) -> str:
    try:
        return Path("/sys/class/dmi/id", name).read_text(errors="replace").strip()
    except OSError:
        return ""
