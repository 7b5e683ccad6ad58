"""Define the clouds' preemption notices: what to ask a metadata service, and what the answer means. Pure.

A look at a cloud's metadata service is a generator: it yields requests, is sent their answers, and returns the Unix
seconds at which the machine goes, or None without a notice:

    AWS     spot/instance-action   404, or the action and its time, two minutes before
    GCP     instance/preempted     FALSE, or TRUE half a minute before
    Azure   scheduledevents        events of this machine and its neighbours, half a minute before and more

Two kinds of notices are ignored. One is a mere possibility (AWS: a recommendation to rebalance). The other is what the
machine comes back from (GCP: maintenance; Azure: Freeze, Reboot, Redeploy): such events are announced up to days
before, or cancelled, or still reported afterwards, and Ray cannot undo a drain. If one ends processes, it is a loss
like others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Literal

Cloud = Literal["AWS", "GCP", "Azure"]

SERVICE = ("169.254.169.254", 80)
"""The address of each cloud's metadata service, seen from its machines."""

LOOK_S = 5.0
"""Seconds between two looks. AWS recommends this; Azure answers five questions a second, of all workers of a machine
together."""

GCP_NOTICE_S = 30.0
"""Seconds that GCP leaves a machine after the notice."""

AZURE_ENDS = ("Preempt", "Terminate")
"""Azure's events after which the machine is gone."""

FIRMWARE = ("sys_vendor", "bios_version", "product_name", "chassis_asset_tag")
"""The names, in Linux, of the machine's firmware fields that `cloud_of` reads."""

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of all of Azure's machines: the vendor alone could be anybody's Hyper-V."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a metadata service."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """The service's answer."""

    status: int
    body: str


Look = Generator[Request, MetadataAnswer, float | None]


def cloud_of(firmware: Mapping[str, str]) -> Cloud | None:
    """Return the cloud that this machine belongs to, by its firmware fields in `FIRMWARE`; None if unknown.

    >>> cloud_of({"sys_vendor": "Amazon EC2"})
    'AWS'
    """
    said = {name: firmware.get(name, "") for name in FIRMWARE}
    # Machines of earlier generations say Xen, and Amazon's version of it.
    if said["sys_vendor"] == "Amazon EC2" or said["bios_version"].endswith("amazon"):
        return "AWS"
    # Google makes laptops, too.
    if said["product_name"] in ("Google", "Google Compute Engine"):
        return "GCP"
    return "Azure" if said["chassis_asset_tag"] == AZURE_TAG else None


def look(cloud: Cloud, now: float) -> Look:
    """Look once at a cloud's metadata service, at `now` in Unix seconds.

    Raises `ValueError` if the answer is undocumented.
    """
    return _LOOKS[cloud](now)


def _aws(now: float) -> Look:
    token = yield Request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    shown = {"X-aws-ec2-metadata-token": _body(token)}
    answer = yield Request("GET", "/latest/meta-data/spot/instance-action", shown)
    if answer.status == 404:
        return None
    match json.loads(_body(answer)):
        case {"action": "terminate" | "stop" | "hibernate", "time": str(time)} if time.endswith("Z"):
            return datetime.fromisoformat(time.removesuffix("Z") + "+00:00").timestamp()
    raise ValueError(f"unexpected action {answer.body[:200]!r}")


def _gcp(now: float) -> Look:
    answer = yield Request("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    match _body(answer).strip():
        case "FALSE":
            return None
        case "TRUE":
            # It may have been so since the last look.
            return now + GCP_NOTICE_S - LOOK_S
    raise ValueError(f"unexpected value of preempted: {answer.body[:200]!r}")


def _azure(now: float) -> Look:
    answer = yield Request("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = _azure_events(answer, now)
    if not events:
        return None
    where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _body((yield Request("GET", where, {"Metadata": "true"}))).strip().lower()
    return min((goes for names, goes in events if name in names), default=None)


def _azure_events(answer: MetadataAnswer, now: float) -> list[tuple[set[str], float]]:
    """Return, for each event that ends machines, their names in lower case (Azure ignores case) and when it begins."""
    found = json.loads(_body(answer))
    try:
        ends = [event for event in found["Events"] if event["EventType"] in AZURE_ENDS]
        return [({name.lower() for name in event["Resources"]}, _begins(event["NotBefore"], now)) for event in ends]
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"unexpected events {answer.body[:200]!r}") from None


def _begins(not_before: str, now: float) -> float:
    # An event that has begun no longer has a time.
    when = parsedate_to_datetime(not_before) if not_before else datetime.fromtimestamp(now, timezone.utc)
    if when.tzinfo is None:
        raise ValueError(f"{not_before!r} has no time zone")
    return when.timestamp()


def _body(answer: MetadataAnswer) -> str:
    if answer.status != 200:
        raise ValueError(f"unexpected status {answer.status}")
    return answer.body


_LOOKS: dict[Cloud, Callable[[float], Look]] = {"AWS": _aws, "GCP": _gcp, "Azure": _azure}
