"""Imitate the metadata services of AWS, GCP and Azure; they reject the requests that the real ones do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import gmtime, strftime

from raytrain_plus.workers.machine.spot import Cloud
from tests.support.servers import running

TOKEN = "AQAAAA-a-token=="
NAME = "gpu-spot_3"
"""The name of the requesting machine, in Azure."""


class Service(ThreadingHTTPServer):
    """A metadata service as one machine sees it."""

    daemon_threads = True

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(("127.0.0.1", 0), {"AWS": Aws, "GCP": Gcp, "Azure": Azure}[cloud])
        self.seen: list[str] = []
        """The requests, as method and path."""
        self.goes: float | None = None
        """When the machine is to go; None without a notice."""
        self.nonsense: tuple[int, str] | None = None
        """A status and body that replace every answer."""

    @property
    def place(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_port


class Talk(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.command} {self.path}")
        status, body = self.server.nonsense or self.answer()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def answer(self) -> tuple[int, str]:
        raise NotImplementedError

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


class Aws(Talk):
    def answer(self) -> tuple[int, str]:
        if "X-Forwarded-For" in self.headers:
            return 403, ""
        if (self.command, self.path) == ("PUT", "/latest/api/token"):
            kept = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            return (200, TOKEN) if kept.isdigit() and 1 <= int(kept) <= 21600 else (400, "")
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return 401, ""
        if (self.command, self.path) != ("GET", "/latest/meta-data/spot/instance-action") or self.server.goes is None:
            return 404, "<html>Not Found</html>"
        when = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(self.server.goes))
        return 200, json.dumps({"action": "terminate", "time": when})


class Gcp(Talk):
    def answer(self) -> tuple[int, str]:
        if self.headers.get("Metadata-Flavor") != "Google":
            return 403, ""
        if (self.command, self.path) != ("GET", "/computeMetadata/v1/instance/preempted"):
            return 404, ""
        return 200, "FALSE" if self.server.goes is None else "TRUE"


class Azure(Talk):
    def answer(self) -> tuple[int, str]:
        if self.headers.get("Metadata") != "true" or "api-version=" not in self.path or self.command != "GET":
            return 400, ""
        path = self.path.partition("?")[0]
        if path == "/metadata/instance/compute/name":
            return 200, NAME
        if path != "/metadata/scheduledevents":
            return 404, ""
        told = [] if self.server.goes is None else [event([NAME], formatdate(self.server.goes, usegmt=True))]
        return 200, events(event(["gpu-spot_1"], formatdate(0, usegmt=True)), *told)


def event(names: list[str], begins: str, kind: str = "Preempt") -> dict[str, object]:
    """Return one of Azure's events."""
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "EventStatus": "Scheduled" if begins else "Started",
        "NotBefore": begins,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def events(*told: dict[str, object]) -> str:
    """Return Azure's answer with these events."""
    return json.dumps({"DocumentIncarnation": 2, "Events": list(told)})


@contextmanager
def speaking(cloud: Cloud) -> Iterator[Service]:
    """Run a service."""
    service = Service(cloud)
    with running(service):
        yield service
