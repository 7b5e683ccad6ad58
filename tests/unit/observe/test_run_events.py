"""Events that are written can be read, after any crash and with any values."""

import errno
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import (
    FIELDS,
    PLAIN_STEP,
    EventLog,
    Tail,
    cut_torn_line,
    event_lines,
    event_of,
    glance,
    log_lines,
    read_events,
)
from raytrain_plus.storage.folders import growing
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder

WHOLE = b'{"time": 1.0, "generation": 0, "kind": "of a later version"}\n'
FINISHED: dict[str, Any] = {"status": "finished", "error": None, "steps": 2, "samples": 4, "state_sha256": "ab"}


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    return LocalFolder(tmp_path)


def test_events_come_back_as_they_were_written(run: Folder) -> None:
    if run.path is not None:
        run.path.mkdir()
    log = EventLog(run, clock=lambda: 12.5)
    log.write("waiting", generation=0, fields={"for": "a\nworker\u2028é"})
    log.write("run_finished", generation=1, time=7.0, fields=FINISHED)
    log.close()
    assert list(read_events(run)) == [
        {"time": 12.5, "generation": 0, "kind": "waiting", "for": "a\nworker\u2028é"},
        {"time": 7.0, "generation": 1, "kind": "run_finished", **FINISHED},
    ]


def test_each_event_can_be_read_as_soon_as_it_is_written(local: Folder) -> None:
    log = EventLog(local)
    log.write("waiting", generation=0, fields={"for": "x"})
    assert [event["kind"] for event in read_events(local)] == ["waiting"]
    log.close()


def test_without_appending_events_are_written_in_parts(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    if run.path is not None:
        pytest.skip("where they can")
    monkeypatch.setattr(growing, "PART_BYTES", 100)
    assert list(read_events(run)) == []
    for controller in range(2):
        log = EventLog(run, clock=lambda: 1.0)
        for number in range(3):
            log.write("waiting", generation=controller, fields={"for": str(number)})
            log.sync()
        log.close()
        told = [(event["generation"], event["for"]) for event in log.read()]
        assert told == [(controller, "0"), (controller, "1"), (controller, "2")]
    assert [event["for"] for event in read_events(run)] == list("012012")
    assert sorted(run.files()) == [f"events-{number:08d}.ndjson" for number in range(1, 5)]


def test_a_log_knows_its_own_events(local: Folder) -> None:
    for controller in range(2):
        log = EventLog(local)
        log.write("waiting", generation=controller, fields={"for": "é"})
        log.close()
        assert [event["generation"] for event in log.read()] == [controller]
    assert [event["generation"] for event in read_events(local)] == [0, 1]


def test_events_that_a_full_disk_rejects_are_written_later(local: Folder) -> None:
    log = EventLog(local, clock=lambda: 1.0)

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

    lines: Any = log._lines
    file, lines._file = lines._file, Full(lines._file)
    for number in range(5):
        log.write("waiting", generation=0, fields={"for": str(number)})
    with pytest.raises(OSError, match=r"No space left on device: '/.*/events\.ndjson'"):
        log.sync()
    assert list(read_events(local)) == []
    lines._file = file
    log.write("waiting", generation=0, fields={"for": "5"})
    log.close()
    assert [event["for"] for event in read_events(local)] == list("012345")


def test_a_long_outage_costs_no_more_than_a_short_one_per_event(local: Folder) -> None:
    class Away:
        def write(self, data: bytearray) -> int:
            raise OSError(errno.EIO, "Input/output error")

    log = EventLog(local)
    lines: Any = log._lines
    file, lines._file = lines._file, Away()
    start = time.process_time()
    for _ in range(40_000):
        log.write("waiting", generation=0, fields={"for": "x" * 60})
    # If each event copied the earlier ones, this would copy 100 GB.
    assert time.process_time() - start < 10
    lines._file = file
    log.close()
    assert len(list(read_events(local))) == 40_000


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        ("step_done", {}, "unknown event kind 'step_done'"),
        ("waiting", {}, "requires the fields"),
        ("waiting", {"for": "x", "since": 1}, "requires the fields"),
    ],
)
def test_unknown_events_are_refused(tmp_path: Path, kind: str, fields: dict[str, Any], match: str) -> None:
    log = EventLog(LocalFolder(tmp_path))
    with pytest.raises(ValueError, match=match):
        log.write(kind, generation=0, fields=fields)
    log.close()
    assert (tmp_path / "events.ndjson").read_bytes() == b""


def test_numbers_that_json_cannot_express_become_text(tmp_path: Path) -> None:
    log = EventLog(LocalFolder(tmp_path))
    told = log.write("evaluated", generation=0, fields={"step": 1, "metrics": {"a": math.nan, "b": [-math.inf]}})
    log.close()
    assert math.isnan(told["metrics"]["a"])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    line = json.loads((tmp_path / "events.ndjson").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"a": "nan", "b": ["-inf"]}


@pytest.mark.parametrize("torn", [b"", b"{", b'{"time": 1.0, "kind"', b"x" * 200_000], ids=len)
@pytest.mark.parametrize("whole", [b"", WHOLE, WHOLE + WHOLE], ids=len)
def test_a_torn_last_line_is_cut_before_appending(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "events.ndjson"
    path.write_bytes(whole + torn)
    assert list(read_events(LocalFolder(tmp_path))) == [json.loads(line) for line in whole.splitlines()]
    log = EventLog(LocalFolder(tmp_path), clock=lambda: 1.0)
    log.write("waiting", generation=2, fields={"for": "x"})
    log.close()
    assert path.read_bytes() == whole + b'{"time": 1.0, "generation": 2, "kind": "waiting", "for": "x"}\n'


@pytest.mark.parametrize(
    ("damaged", "match"),
    [
        (b"{torn", "Expecting property name"),
        (bytes(9), "Expecting value"),
        (b"\xff\xfe\xfd", "UnicodeDecodeError"),
        (b"[]", "it is not an object"),
        (b"", "Expecting value"),
        (b'{"time": 1.0, "kind": "waiting", "for": "x"}', "the event has no field 'generation'"),
        (b'{"time": 1.0, "generation": 0, "kind": "resumed", "step": 3}', "the event has no field 'checkpoint'"),
        (b'{"time": 1.0, "generation": "0", "kind": "waiting", "for": "x"}', "generation: '0' is not an integer"),
    ],
)
def test_the_error_of_a_damaged_line_names_its_place(run: Folder, damaged: bytes, match: str) -> None:
    file = "events.ndjson" if run.path is not None else "events-00000001.ndjson"
    run.write(file, [WHOLE, damaged, b"\n", WHOLE])
    events = read_events(run)
    assert next(events)["kind"] == "of a later version"
    with pytest.raises(InputError, match=rf"run/{file}, line 2: the file is damaged: .*{match}"):
        next(events)
    # `event_lines` returns damaged lines too.
    assert len(list(event_lines(run))) == 3


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"a line\nand what looks torn")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.ndjson").symlink_to(foreign)
    for use in (EventLog, lambda run: list(read_events(run))):
        with pytest.raises(InputError, match=r"events\.ndjson: a link points outside"):
            use(LocalFolder(tmp_path / "run"))
    assert foreign.read_bytes() == b"a line\nand what looks torn"


def test_a_missing_file_has_no_torn_line(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "events.ndjson")
    assert not (tmp_path / "events.ndjson").exists()


def test_optional_fields_of_a_step_and_those_older_versions_lack(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    fields = {"step": 0, "epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": float("nan"), "seconds": 0.1}
    log = EventLog(run, clock=lambda: 0.0)
    optional = {"skipped": True, "rows_skipped": 3, "metrics": {"a": 1.5, "b": float("nan")}, "lr": [0.5, float("inf")]}
    log.write("step_committed", generation=0, fields={**fields, **optional})
    with pytest.raises(ValueError, match="skipt"):
        log.write("step_committed", generation=0, fields={**fields, "skipt": True})
    log.close()
    path = tmp_path / "events.ndjson"
    path.write_bytes(path.read_bytes() + path.read_bytes().replace(b'"grad_norm": "nan", ', b""))
    new, old = read_events(run)
    assert new["skipped"]
    assert new["metrics"] == {"a": 1.5, "b": "nan"}
    assert new["lr"] == [0.5, "inf"]
    assert math.isnan(float(new["grad_norm"]))
    assert "grad_norm" not in old
    path.write_bytes(path.read_bytes().replace(b'"lr": [0.5, "inf"]', b'"lr": 0.5'))
    assert next(iter(read_events(run)))["lr"] == 0.5
    path.write_bytes(path.read_bytes().replace(b'"lr": 0.5', b'"lr": [null]'))
    with pytest.raises(InputError, match="lr: entry 0: None is not a number"):
        list(read_events(run))


def test_a_view_says_what_broke_the_one_before_it_if_anything_did(local: Folder) -> None:
    member = {"worker": "w", "replica": 1, "stage": 0, "params": 7, "shards": [0]}
    view = {"members": [member], "spares": [], "collective": "solo", "moved_bytes": 0}
    log = EventLog(local)
    log.write("view_formed", generation=0, fields=view)
    log.write("view_formed", generation=1, fields={**view, "cause": "w: cannot start the all-reduce"})
    log.close()
    assert [event.get("cause") for event in read_events(local)] == [None, "w: cannot start the all-reduce"]


def test_a_member_of_an_older_version_is_read_with_its_replica(local: Folder) -> None:
    member = {"worker": "w", "replica": 1, "stage": 0, "params": 7, "shards": [0]}
    log = EventLog(local)
    view = {"members": [member], "spares": [], "collective": "solo", "moved_bytes": 0}
    log.write("view_formed", generation=0, fields=view)
    log.close()
    path = local.path_of("events.ndjson")
    assert path is not None
    path.write_bytes(path.read_bytes().replace(b'"replica"', b'"cell"'))
    assert b"cell" in path.read_bytes()

    for read in (read_events, glance):
        assert [view["members"] for view in read(local)] == [[member]]


def test_no_kind_has_a_field_that_every_event_has() -> None:
    assert not [kind for kind, fields in FIELDS.items() if {"time", "generation", "kind"} & set(fields)]


def test_a_tail_yields_each_event_once(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "PART_BYTES", 250)
    if run.path is not None:
        run.path.mkdir()
    tail = Tail(run)
    assert list(tail.read()) == []
    got: list[str] = []
    for controller in range(2):
        log = EventLog(run)
        for number in range(controller * 7, controller * 7 + 7):
            log.write("waiting", generation=controller, fields={"for": str(number)})
            if number % 3 != 1:
                log.sync()
                got += [event["for"] for event in tail.read()]
                assert got[-1] == str(number)
                assert list(tail.read()) == []
        log.close()
    got += [event["for"] for event in tail.read()]
    assert got == [str(number) for number in range(14)]


def test_a_line_that_is_still_being_written_is_left_for_later(local: Folder) -> None:
    assert local.path is not None
    tail, file = Tail(local), local.path / "events.ndjson"
    file.write_bytes(WHOLE + WHOLE[:20])
    assert len(list(tail.read())) == 1
    assert list(tail.read()) == []
    file.write_bytes(WHOLE + WHOLE)
    assert len(list(tail.read())) == 1


def test_events_written_during_a_read_are_read_once(local: Folder) -> None:
    assert local.path is not None
    tail, file = Tail(local), local.path / "events.ndjson"
    file.write_bytes(WHOLE + WHOLE[:20])
    reading = tail.read()
    next(reading)
    with file.open("ab") as more:
        more.write(WHOLE[20:] + WHOLE)
    assert len([*reading, *tail.read()]) == 2
    assert not list(tail.read())


def test_a_glance_skips_only_steps_and_keeps_the_step_before_each_other_event(run: Folder) -> None:
    if run.path is not None:
        run.path.mkdir()
    log = EventLog(run, clock=lambda: 0.0)
    fields = {"epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": 0.3, "seconds": 0.1}
    for step in range(9001):
        log.write("step_committed", generation=0, fields={"step": step, **fields})
        if step == 8500:
            log.write("waiting", generation=0, fields={"for": '"kind": "step_committed"'})
    log.close()
    seen = list(glance(run))
    steps = [event["step"] for event in seen if event["kind"] == "step_committed"]
    assert steps[:2000] == list(range(2000))
    assert steps == sorted(set(steps))
    assert steps[-1] == 9000
    assert 4000 < len(steps) < 4500
    waits = [event["kind"] for event in seen].index("waiting")
    assert seen[waits - 1]["step"] == 8500


STEP: dict[str, Any] = {"step": 12, "epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": 1.5, "seconds": 0.25}


@pytest.mark.parametrize("more", [{}, {"lr": 0.5}, {"lr": [1e-05, 2]}, {"loss": math.nan, "grad_norm": -1e300}])
def test_a_plain_step_is_one_that_the_parser_accepts(local: Folder, more: dict[str, Any]) -> None:
    log = EventLog(local, clock=lambda: 1764394783.25)
    log.write("step_committed", generation=3, fields={**STEP, **more})
    log.close()
    [(place, name, number, line)] = log_lines(local)
    assert place == 0
    damaged = [
        line[:at] + new + line[at + gone :]
        for at in range(len(line))
        for gone in (0, 1, 2)
        for new in (b"", b"0", b"9", b"-", b".", b"e", b'"', b"{", b"\xff", b"9" * 20)
    ]
    plain = 0
    for one in [line, *damaged]:
        if found := PLAIN_STEP(one):
            plain += 1
            event = event_of(local, (place, name, number, one))
            told = [event[field] for field in ("time", "generation", "step", "seconds")]
            assert [float(text) for text in found.groups()] == told
    # Another digit is another number.
    assert len(damaged) > plain > 30


@pytest.mark.parametrize("more", [{"skipped": True}, {"rows_skipped": 1}, {"metrics": {"a": 1.0}}])
def test_a_step_with_more_is_not_plain(local: Folder, more: dict[str, Any]) -> None:
    log = EventLog(local)
    log.write("step_committed", generation=3, fields={**STEP, **more})
    log.close()
    [line] = log_lines(local)
    assert PLAIN_STEP(line[3]) is None


def test_a_line_is_behind_the_place_where_a_tail_begins_with_it(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "PART_BYTES", 1)
    if run.path is not None:
        run.path.mkdir()
    log = EventLog(run)
    for number in range(3):
        log.write("waiting", generation=0, fields={"for": "é" * number})
        log.sync()
    log.close()
    for number, line in enumerate(log_lines(run)):
        assert [event["for"] for event in Tail(run, line[0]).read()] == ["é" * one for one in range(number, 3)]


def test_a_log_knows_its_newest_step_that_no_kill_loses(run: Folder) -> None:
    if run.path is not None:
        run.path.mkdir()
    log = EventLog(run, newest=(1, 11))
    assert log.kept == (1, 11)
    log.write("step_committed", generation=3, fields=STEP)
    log.write("waiting", generation=3, fields={"for": "x"})
    # A file has it at once, an object when it is written.
    assert log.kept == ((1, 11) if run.path is None else (3, 12))
    log.sync()
    assert log.kept == (3, 12)
    log.close()


def test_a_step_that_the_disk_rejects_is_not_kept(local: Folder) -> None:
    log = EventLog(local)
    lines: Any = log._lines
    file, lines._file = lines._file, SimpleNamespace(write=_rejected)
    log.write("step_committed", generation=3, fields=STEP)
    assert log.kept is None
    lines._file = file
    log.sync()
    assert log.kept == (3, 12)
    log.close()


def _rejected(data: bytearray) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
