"""A follower: a listener that fails or is slow is retried, reported once, and hears of each event in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import EventLog, RunEvent
from raytrain_plus.observe.trackers import listener as module
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.observe.trackers.listener import Follower, Listener, RunEnd, in_short
from raytrain_plus.storage.interface import Folder
from tests.support.events import committed, tell
from tests.support.listeners import until


class Failing:
    """A listener that fails a given number of times."""

    period_s = 0.001
    most = 2

    def __init__(self, times: int) -> None:
        self.times = times
        self.got: list[int] = []
        self.most_together = 0
        self.ended: list[str] = []

    def hear(self, events: Sequence[RunEvent]) -> None:
        if self.times:
            self.times -= 1
            raise ConnectionError("https://me:secret@host is away\nbecause")
        self.got += [event["step"] for event in events]
        self.most_together = max(self.most_together, len(events))

    def end(self, status: str) -> None:
        self.ended.append(status)


class Followed:
    """A run's log and a follower of it, on a thread."""

    def __init__(self, run: Folder, make: Callable[[], Listener], behind: int = 0) -> None:
        self.said: list[tuple[str, str]] = []
        self.end = RunEnd()
        self.bookmark = Bookmark(run, "failing", behind)
        follower = Follower("failing", make, run, self.bookmark, self.end, lambda *one: self.said.append(one))
        self.thread = threading.Thread(target=follower.follow, daemon=True)
        self.thread.start()

    def finish(self, status: str) -> None:
        self.end.ended(status)
        self.thread.join(20)
        assert not self.thread.is_alive()

    @property
    def causes(self) -> list[str]:
        return [cause for cause, _ in self.said]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    monkeypatch.setattr(module, "REMOTE_S", 0.01)
    return


def test_events_are_retried_and_heard_once_in_order(run: Folder) -> None:
    tell(run, committed(0, 0, 1, 2))
    listener = Failing(3)
    followed = Followed(run, lambda: listener)
    until(lambda: listener.got == [0, 1, 2])
    tell(run, committed(0, 3))
    followed.finish("stopped")
    assert (listener.got, listener.most_together, listener.ended) == ([0, 1, 2, 3], 2, ["stopped"])
    assert followed.causes == ["retried"] * 3
    assert followed.said[0][1] == "failing does not accept events; retrying: ConnectionError: https://***@host is away"
    again = Bookmark(run, "failing", 0)
    again.load()
    assert again.place == followed.bookmark.place > (0, 0)


def test_after_the_end_there_is_one_attempt(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 60.0)
    tell(run, committed(0, 0, 1))
    listener = Failing(9)
    followed = Followed(run, lambda: listener)
    until(lambda: followed.said)
    followed.finish("finished")
    assert (listener.times, listener.ended) == (7, [])
    assert followed.causes == ["retried", "retried", "lost"]
    # The next process begins with them.
    assert followed.bookmark.place == (0, 0)


def test_a_listener_that_cannot_be_made_is_tried_again(run: Folder) -> None:
    tell(run, committed(0, 0))
    listener = Failing(0)
    left = [OSError("busy"), RuntimeError("broken")]

    def make() -> Listener:
        if left:
            raise left.pop()
        return listener

    followed = Followed(run, make)
    followed.finish("finished")
    # The run may end at any attempt.
    assert listener.got in ([0], [])
    assert set(followed.causes) <= {"retried", "lost"}


def test_a_mistake_of_the_user_is_no_failure_to_retry(run: Folder) -> None:
    tries: list[int] = []

    def make() -> Listener:
        tries.append(1)
        raise InputError("no such class")

    followed = Followed(run, make)
    followed.thread.join(20)
    assert (followed.thread.is_alive(), len(tries)) == (False, 1)
    assert followed.said == [("given up", "failing: no event of this run is delivered: no such class")]


def test_a_storage_that_takes_no_bookmark_costs_no_event(run: Folder) -> None:
    tell(run, committed(0, 0, 1, 2))
    if run.path is None:
        pytest.skip("a folder on a file system")
    (run.path / "trackers").write_text("in the way")
    listener = Failing(0)
    followed = Followed(run, lambda: listener)
    followed.finish("finished")
    assert (listener.got, listener.ended) == ([0, 1, 2], ["finished"])


def test_messages_contain_no_secrets() -> None:
    error = ValueError("401 for hunter2 at https://me:pw@host/x?a=b@c\nmore")
    assert (
        in_short(error, {"WANDB_API_KEY": "hunter2", "WANDB_MODE": "401"})
        == "ValueError: 401 for *** at https://***@host/x?a=b@c"
    )


def test_a_log_that_grows_is_followed(run: Folder) -> None:
    tell(run, [])
    log = EventLog(run)
    listener = Failing(0)
    followed = Followed(run, lambda: listener)
    for _, kind, fields in committed(0, *range(20)):
        log.write(kind, generation=0, fields=fields)
    log.sync()
    until(lambda: listener.got == [*range(20)])
    log.close()
    followed.finish("finished")
    assert listener.got == [*range(20)]


def test_a_listener_misses_and_repeats_nothing_if_another_controller_continues_the_log(run: Folder) -> None:
    tell(run, [*committed(0, 0), *committed(0, 1)])
    first = EventLog(run)
    behind = first.behind
    steps = committed(1, *range(2, 7))
    for generation, kind, fields in steps[:2]:
        first.write(kind, generation=generation, fields=fields)
    first.sync()
    early, late = Failing(0), Failing(0)
    followed = Followed(run, lambda: early, behind)
    until(lambda: early.got == [2, 3])
    followed.end.stop()
    followed.thread.join(20)
    # Its listener is dead when the controller tells this, and dies.
    first.write(steps[2][1], generation=1, fields=steps[2][2])
    first.sync()
    second = EventLog(run, behind=behind)
    assert second.behind == behind
    for generation, kind, fields in steps[3:]:
        second.write(kind, generation=generation, fields=fields)
    second.close()
    followed = Followed(run, lambda: late, second.behind)
    followed.finish("finished")
    assert (early.got, late.got) == ([2, 3], [4, 5, 6])
    assert not followed.bookmark.in_earlier_log
    assert [event["step"] for event in second.read()] == [2, 3, 4, 5, 6]
    first.abandon()
    first.close()
