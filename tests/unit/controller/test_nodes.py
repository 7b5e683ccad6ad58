"""The draining and unresponsive nodes that the thread reports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray

from raytrain_plus.controller.group import nodes
from raytrain_plus.controller.group.nodes import KNOCK_S, Draining, NodeLost, Nodes


class Looks(threading.Event):
    """Ends after so many polls, without waiting between them; `look` is called before each."""

    def __init__(self, count: int, look: Callable[[int], None]) -> None:
        super().__init__()
        self.count = count
        self.look = look
        self.number = -1

    def wait(self, timeout: float | None = None) -> bool:
        self.number += 1
        if self.is_set() or self.number == self.count:
            return True
        self.look(self.number)
        return False


class Cluster:
    """Ray's answers at each poll, and what is reported of them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        draining: Sequence[Any],
        suspected: Sequence[Sequence[str]] = (),
        known: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Replace Ray by these answers.

        `draining` and `suspected`: the answers by poll; an exception is raised. `known`: as in `ray.nodes`.
        """
        self.told: list[Any] = []
        self.asked: list[int] = []
        """The polls at which the draining nodes were requested."""
        self._answers = draining
        self._suspected = suspected
        self._looks = Looks(len(draining), self._suspect)
        monkeypatch.setattr(nodes, "draining_nodes", self._draining)
        monkeypatch.setattr(ray, "nodes", lambda: list(known))
        self._watched = Nodes(self._looks)

    def _suspect(self, number: int) -> None:
        self._watched.suspect(dict.fromkeys(self._suspected[number] if self._suspected else ()).keys())

    def _draining(self) -> Any:
        self.asked.append(self._looks.number)
        answer = self._answers[self._looks.number]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def watch(self) -> list[Any]:
        """Return the thread's reports until it ends: draining nodes as a mapping, a lost one as a name."""
        self._watched.watch(self._put)
        return self.told

    def _put(self, message: object) -> None:
        assert isinstance(message, (Draining, NodeLost))
        self.told.append(message.node if isinstance(message, NodeLost) else dict(message.nodes))


@pytest.fixture
def listening() -> Iterator[int]:
    """Open a port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def node(name: str, port: int, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_drain_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [{}, {"a": 30.0}, {"a": 30.0}, {"a": 30.0}])
    assert cluster.watch() == [{"a": 30.0}]
    assert cluster.asked == [0, 1, 2, 3]


def test_a_drain_that_changes_is_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = [{"a": None}, {"a": 30.0}, {"a": 30.0, "b": None}, {"b": None}, {}, {}]
    assert Cluster(monkeypatch, looks).watch() == looks[:5]


def test_a_ray_that_cannot_report_drains_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [{"a": None}, None, {}, {}], suspected=[[], [], [], ["b"]])
    # Unresponsive nodes are looked for all the same.
    assert cluster.watch() == [{"a": None}, "b"]
    assert cluster.asked == [0, 1]


def test_a_suspected_node_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    known = [node("other", closed_port()), node("a", listening)]
    assert Cluster(monkeypatch, [{}, {}], suspected=[["a"], ["a"]], known=known).watch() == []


def test_a_suspected_node_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    known = [node("a", listening), node("b", closed_port()), node("dead", listening, alive=False)]
    cluster = Cluster(monkeypatch, [{}], suspected=[["a", "b", "dead", "unknown"]], known=known)
    assert cluster.watch() == ["b", "dead", "unknown"]


def test_a_node_is_probed_twice_and_not_for_ever(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    limits: list[float] = []
    connect = socket.create_connection

    def once_in_vain(where: tuple[str, int], timeout: float) -> socket.socket:
        limits.append(timeout)
        if len(limits) in (1, 3, 4):
            raise TimeoutError
        return connect(where, timeout)

    monkeypatch.setattr(socket, "create_connection", once_in_vain)
    known = [node("a", listening)]
    assert Cluster(monkeypatch, [{}, {}], suspected=[["a"], ["a"]], known=known).watch() == ["a"]
    assert limits == [KNOCK_S] * 4


def test_a_briefly_unreachable_head_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [{"a": None}, ConnectionError("no head"), {"a": None}, RuntimeError("still none"), {"a": 5.0}]
    cluster = Cluster(monkeypatch, looks, suspected=[[], [], [], [], ["b"]])
    assert cluster.watch() == [{"a": None}, {"a": 5.0}, "b"]
    assert [record.getMessage() for record in caplog.records] == ["cannot check the nodes; trying again"] * 2


def test_polling_ends_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "POLL_S", 0.005)
    looked = threading.Event()

    def draining() -> dict[str, float | None]:
        looked.set()
        return {}

    monkeypatch.setattr(nodes, "draining_nodes", draining)
    watched = Nodes()
    thread = threading.Thread(target=watched.watch, args=(print,))
    thread.start()
    assert looked.wait(10)
    watched.close()
    thread.join(10)
    assert not thread.is_alive()
