"""The watcher for a cloud's notices, against services on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from raytrain_plus.workers.machine import notices
from raytrain_plus.workers.machine.notices import SILENT, hear_notices, listen
from raytrain_plus.workers.machine.spot import LOOK_S, Cloud
from tests.unit.workers.clouds import Service, speaking

ASKED = {
    "AWS": ["PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"],
    "GCP": ["GET /computeMetadata/v1/instance/preempted"],
    "Azure": [
        "GET /metadata/scheduledevents?api-version=2020-07-01",
        "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text",
    ],
}
"""At each look: in Azure, an event of the neighbour makes the watcher ask for the machine's name."""

CLOUDS: list[Cloud] = ["AWS", "GCP", "Azure"]


class Machine:
    """A machine that listens; between two looks, the next of `happens` is called."""

    def __init__(self, cloud: Cloud, service: Service, *happens: Callable[[], object]) -> None:
        self.cloud, self.place = cloud, service.place
        self.happens = list(happens)
        self.looks: list[float] = []
        self.told: list[tuple[str, float]] = []
        self.takes: list[Any] = [True]
        """What `drain` returns, or raises."""

    def listen(self) -> None:
        listen(self.cloud, self.place, self.drain, self.wait)

    def drain(self, why: str, goes: float) -> bool | None:
        self.told.append((why, goes))
        found = self.takes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def wait(self, seconds: float) -> None:
        self.looks.append(seconds)
        self.happens.pop(0)()


def goes_at(service: Service, when: float) -> Callable[[], None]:
    return lambda: setattr(service, "goes", when)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_is_passed_on_once(monkeypatch: pytest.MonkeyPatch, cloud: Cloud) -> None:
    # No proxy is there.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    goes = float(round(time.time()) + 120)
    with speaking(cloud) as service:
        machine = Machine(cloud, service, lambda: None, goes_at(service, goes))
        began = time.time()
        machine.listen()
        assert service.seen == ASKED[cloud] * 3
    assert machine.looks == [LOOK_S] * 2
    [(why, deadline)] = machine.told
    assert why == f"{cloud} preempts it"
    if cloud == "GCP":
        assert began + 25 <= deadline <= time.time() + 25
    else:
        assert deadline == goes


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_with_invalid_or_no_answers_is_still_polled(caplog: pytest.LogCaptureFixture, cloud: Cloud) -> None:
    with speaking(cloud) as service:

        def says(nonsense: tuple[int, str] | None) -> Callable[[], None]:
            return lambda: setattr(service, "nonsense", nonsense)

        more = [lambda: None] * SILENT
        machine = Machine(cloud, service, says((500, "")), says((200, "<html>")), says((200, "\N{SNOWMAN}")), *more)
        machine.happens += [says(None), goes_at(service, time.time() + 60)]
        machine.listen()
    assert len(machine.told) == 1
    [silent, taken] = [record.message for record in caplog.records]
    assert silent.startswith(f"a preemption notice from {cloud} would be missed: ")
    assert taken.startswith(f"{cloud} preempts this node in ")


def test_a_missing_service_is_still_polled(caplog: pytest.LogCaptureFixture) -> None:
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    with speaking("AWS") as service:
        machine = Machine("AWS", service, *[lambda: None] * (2 * SILENT), enough)
    with pytest.raises(Enough):
        machine.listen()
    [record] = caplog.records
    assert "Connection refused" in record.message
    assert machine.told == []


def test_a_few_failures_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with speaking("GCP") as service:
        service.nonsense = (503, "")
        happens: list[Callable[[], object]] = [lambda: None] * (SILENT - 2)
        well = [lambda: setattr(service, "nonsense", None), lambda: setattr(service, "nonsense", (503, ""))]
        machine = Machine("GCP", service, *happens, *well, *happens, well[0], goes_at(service, 1))
        machine.listen()
    assert [record.message.partition(" in ")[0] for record in caplog.records] == ["GCP preempts this node"]


def test_ray_is_told_until_it_accepts(caplog: pytest.LogCaptureFixture) -> None:
    with speaking("GCP") as service:
        service.goes = 1
        away: list[Callable[[], object]] = [lambda: None, lambda: setattr(service, "nonsense", (500, ""))]
        machine = Machine("GCP", service, *away, lambda: None)
        machine.takes = [False, ConnectionError("no head"), False, True]
        machine.listen()
    # Each look at GCP would postpone the time.
    assert len(machine.told) == 4
    assert len({goes for _, goes in machine.told}) == 1
    assert "Ray cannot be told; trying again" in caplog.text
    assert "no head" in caplog.text


def test_a_ray_that_can_never_be_told_is_told_once() -> None:
    with speaking("GCP") as service:
        service.goes = 1
        machine = Machine("GCP", service)
        machine.takes = [None]
        machine.listen()
    assert len(machine.told) == 1


def test_nobody_listens_outside_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))
    firmware = {"sys_vendor": "QEMU\n"}
    monkeypatch.setattr(Path, "read_text", read_from(firmware))
    hear_notices()
    assert begun == []
    firmware["sys_vendor"] = "Amazon EC2\n"
    hear_notices()
    [thread] = begun
    assert thread.daemon
    assert thread._args == ("AWS", ("169.254.169.254", 80), notices.drain_this_node)


def read_from(firmware: dict[str, str]) -> Callable[..., str]:
    def read(path: Path, **how: Any) -> str:
        assert path.parent == Path("/sys/class/dmi/id")
        if path.name not in firmware:
            raise FileNotFoundError(path)
        return firmware[path.name]

    return read
