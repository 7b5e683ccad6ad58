"""The event log: what is written can be read, whatever crashed before and whatever the figures are."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.observe.events import FIELDS, EventLog, cut_torn_line, read_events

FINISHED: dict[str, Any] = {"status": "finished", "error": None, "steps": 2, "samples": 4, "state_sha256": "ab"}


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.ndjson", clock=lambda: 12.5)
    log.write("waiting", generation=0, fields={"for": "a\nworker\u2028é"})
    log.write("run_finished", generation=1, time=7.0, fields=FINISHED)
    log.close()
    assert list(read_events(tmp_path / "events.ndjson")) == [
        {"time": 12.5, "generation": 0, "kind": "waiting", "for": "a\nworker\u2028é"},
        {"time": 7.0, "generation": 1, "kind": "run_finished", **FINISHED},
    ]


def test_each_event_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.ndjson")
    log.write("waiting", generation=0, fields={"for": "x"})
    assert [event["kind"] for event in read_events(tmp_path / "events.ndjson")] == ["waiting"]
    log.close()


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.ndjson", clock=lambda: 1.0)

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 30

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            count, self.room = min(self.room, len(data)), 0
            return int(self.file.write(data[:count]))

        def fileno(self) -> int:
            return int(self.file.fileno())

    file: Any = log._file
    log._file = Full(file)  # type: ignore[assignment]
    for number in range(5):
        log.write("waiting", generation=0, fields={"for": str(number)})
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    assert list(read_events(tmp_path / "events.ndjson")) == []
    log._file = file
    log.write("waiting", generation=0, fields={"for": "5"})
    log.close()
    assert [event["for"] for event in read_events(tmp_path / "events.ndjson")] == list("012345")


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        ("step_done", {}, "there is no event 'step_done'"),
        ("waiting", {}, "has the fields"),
        ("waiting", {"for": "x", "since": 1}, "has the fields"),
    ],
)
def test_an_event_that_the_table_does_not_know_is_a_fault(
    tmp_path: Path, kind: str, fields: dict[str, Any], match: str
) -> None:
    log = EventLog(tmp_path / "events.ndjson")
    with pytest.raises(ValueError, match=match):
        log.write(kind, generation=0, fields=fields)
    log.close()
    assert (tmp_path / "events.ndjson").read_bytes() == b""


def test_figures_that_json_has_no_word_for_become_text(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.ndjson")
    told = log.write("evaluated", generation=0, fields={"step": 1, "metrics": {"a": math.nan, "b": [-math.inf]}})
    log.close()
    assert math.isnan(told["metrics"]["a"])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    line = json.loads((tmp_path / "events.ndjson").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"a": "nan", "b": ["-inf"]}


@pytest.mark.parametrize("torn", [b"", b"{", b'{"time": 1.0, "kind"', b"x" * 200_000], ids=len)
@pytest.mark.parametrize("whole", [b"", b'{"kind": "a"}\n', b'{"kind": "a"}\n{"kind": "b"}\n'], ids=len)
def test_a_torn_last_line_is_cut_before_appending(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "events.ndjson"
    path.write_bytes(whole + torn)
    assert list(read_events(path)) == [json.loads(line) for line in whole.splitlines()]
    log = EventLog(path, clock=lambda: 1.0)
    log.write("waiting", generation=2, fields={"for": "x"})
    log.close()
    assert path.read_bytes() == whole + b'{"time": 1.0, "generation": 2, "kind": "waiting", "for": "x"}\n'


def test_a_file_that_is_not_there_has_no_torn_line(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "events.ndjson")
    assert not (tmp_path / "events.ndjson").exists()


def test_no_kind_has_a_field_that_every_event_has() -> None:
    assert not [kind for kind, fields in FIELDS.items() if {"time", "generation", "kind"} & set(fields)]
