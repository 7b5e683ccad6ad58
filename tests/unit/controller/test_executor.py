"""Commands are carried out one after the other; what arises meanwhile waits."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from raytrain_plus.controller.executor import Executor
from raytrain_plus.controller.run import merged
from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.sizes import SizeTable

COMMANDS: tuple[type[Any], ...] = get_args(e.Command)
OTHER = dict(zip(COMMANDS, (*COMMANDS[1:], COMMANDS[0]), strict=True))


class Done:
    """A machine that gives two commands for each event, and handlers that note what they carry out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, feeds: type[Any], event: Any) -> None:
        """`feeds`: the kind of command in whose handler `event` arises."""
        self.order: list[str] = []
        self.executor = Executor(Limits(SizeTable(1, 1, 1), spares=0, steps=1, max_failures=None, expected=1), -1)
        monkeypatch.setattr(state_machine, "step", self.step)
        self.feeds, self.event = feeds, event
        handlers = dict.fromkeys(COMMANDS, self.carry_out)
        self.executor.serve(handlers, lambda: self.order.append("look"))

    def step(self, group: Any, event: Any) -> Any:
        self.order.append(event)
        return group, [object.__new__(self.feeds), object.__new__(OTHER[self.feeds])] if event == "first" else []

    def carry_out(self, command: Any) -> None:
        self.order.append(type(command).__name__)
        if type(command) is self.feeds and self.event not in self.order:
            self.executor.feed(self.event)
            self.order.append("handled")


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_event_from_within_a_handler_waits_for_the_commands_before_it(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Done(monkeypatch, kind, "second")
    done.executor.feed("first")  # type: ignore[arg-type]
    assert done.order == ["first", kind.__name__, "handled", OTHER[kind].__name__, "look", "second", "look"]


def test_what_waits_is_forgotten_if_a_handler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Done(monkeypatch, e.Start, "second")

    def fail(command: Any) -> None:
        done.executor.feed("second")  # type: ignore[arg-type]
        raise OSError("the storage is gone")

    done.executor.serve(dict.fromkeys(COMMANDS, fail), lambda: None)
    with pytest.raises(OSError, match="the storage is gone"):
        done.executor.feed("first")  # type: ignore[arg-type]
    assert done.order == ["first"]
    done.executor.serve(dict.fromkeys(COMMANDS, done.carry_out), lambda: None)
    done.executor.feed("third")  # type: ignore[arg-type]
    assert done.order == ["first", "third"], "it is heard, and the machine is not stuck"


class Part:
    def __init__(self, *kinds: type[Any]) -> None:
        self.handles = dict.fromkeys(kinds, print)


def test_two_parts_cannot_handle_one_command() -> None:
    assert set(merged([Part(e.Start), Part(e.Join)])) == {e.Start, e.Join}
    with pytest.raises(ValueError, match="two parts of the controller handle Start"):
        merged([Part(e.Start), Part(e.Join, e.Start)])
