"""Listens for the cloud's word that it takes this machine back, and hands it to Ray; the controller does the rest.

Each worker listens in its own process: an actor of its own for that, left on an empty machine, would keep an autoscaler
from ever letting the machine go. Nothing of it stops or slows a run: what fails is said, and tried again.
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
from raytrain_plus.workers.spot import FIRMWARE, LOOK_S, SERVICE, Answer, Cloud, Request, cloud_of, look

ANSWER_S = 5.0
"""Limit of each wait for a metadata service."""
LONGEST = 1 << 16
"""Bytes of an answer that are read."""
SILENT = 30
"""So many looks in a row fail before that is said: Azure may take two minutes to its first answer."""

log = logging.getLogger(__name__)


def hear_notices() -> None:
    """Listens from now on, on a thread, where this machine is a cloud's; nowhere else is anybody asked.

    To be called once, when all that adds variables to the environment has done so: see `load_horovod`.
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
    """Looks again and again, until the machine is to go and `drain` has been told why and when, in Unix seconds.

    `drain` returns whether it took that, or None where it never will; and `wait` is called between two looks.
    """
    goes: float | None = None
    failed = 0
    while True:
        try:
            told = ask(cloud, service)
            failed = 0
            # GCP's word has no time, and each look would put it off.
            goes = min((when for when in (goes, told) if when is not None), default=None)
        except Exception as error:
            failed += 1
            if failed == SILENT:
                log.warning("%s would not be heard if it took this machine back: %s; trying again", cloud, error)
        if goes is not None and _handed_on(cloud, goes, drain):
            return
        wait(LOOK_S)


def ask(cloud: Cloud, service: tuple[str, int]) -> float | None:
    """When the machine goes, in Unix seconds; None where nobody has said so. Raises what is wrong with the answer."""
    asking = look(cloud, time.time())
    request = next(asking)
    while True:
        answer = _answer(service, request)
        try:
            request = asking.send(answer)
        except StopIteration as end:
            goes: float | None = end.value
            return goes


def _answer(service: tuple[str, int], request: Request) -> Answer:
    # No proxy, whatever the environment says: it would ask its own machine's service.
    with contextlib.closing(HTTPConnection(*service, timeout=ANSWER_S)) as connection:
        connection.request(request.method, request.path, headers=dict(request.headers))
        response = connection.getresponse()
        return Answer(response.status, response.read(LONGEST).decode())


def _handed_on(cloud: Cloud, goes: float, drain: Callable[[str, float], bool | None]) -> bool:
    """Whether nothing is left to be done."""
    try:
        taken = drain(f"{cloud} takes it back", goes)
    except Exception:
        # Ray's own head may be out of reach for a moment.
        log.warning("%s takes this machine back, and Ray cannot be told; trying again", cloud, exc_info=True)
        return False
    if taken:
        log.warning("%s takes this machine back in %.0f s", cloud, goes - time.time())
    return taken is not False


def _firmware(name: str) -> str:
    try:
        return Path("/sys/class/dmi/id", name).read_text(errors="replace").strip()
    except OSError:
        return ""
