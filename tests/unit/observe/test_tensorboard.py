"""TensorBoard's files, read back by another implementation of the format."""

import doctest
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event as Payload
from tensorboardX.proto.event_pb2 import SessionLog

from raytrain_plus.observe.trackers import tensorboard as module
from raytrain_plus.observe.trackers.listener import StorageAway
from raytrain_plus.observe.trackers.tensorboard import TensorBoard
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.support.events import payloads, shown
from tests.unit.observe.feed import Event, evaluated, event, step


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("events.out.tfevents.*")
    return file


def figures(folder: Path) -> list[tuple[str, int, float, float]]:
    first, *rest = payloads(only_file(folder).read_bytes())
    assert first.file_version == "brain.Event:2"
    return [(one.summary.value[0].tag, one.step, one.summary.value[0].simple_value, one.wall_time) for one in rest]


def loss(number: int, value: float | str, **fields: float) -> Event:
    return {**step(number, seconds=0.0), "loss": value, **fields}


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_figures_come_back_under_their_names_and_steps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    made = TensorBoard(LocalFolder(tmp_path / "run" / "tensorboard"), {})
    made.hear([event("waiting", **{"for": "x"})])
    assert not (tmp_path / "run" / "tensorboard").exists()
    made.hear([evaluated(-1, größe=0.25), loss(0, 5.25, time=1_700_000_000.25)])
    made.hear([loss(70_000, 4.5)])
    made.end("finished")
    assert figures(tmp_path / "run" / "tensorboard") == [
        ("evaluation/größe", 0, 0.25, 0.0),
        ("train/loss", 0, 5.25, 1_700_000_000.25),
        ("train/loss", 70_000, 4.5, 0.0),
    ]


@pytest.mark.parametrize(
    ("value", "read"), [("inf", math.inf), (1e300, math.inf), (-1e300, -math.inf), ("nan", math.nan)]
)
def test_a_value_out_of_range_is_infinite(tmp_path: Path, value: float | str, read: float) -> None:
    TensorBoard(LocalFolder(tmp_path), {}).hear([loss(0, value)])
    assert figures(tmp_path)[0][2] == pytest.approx(read, nan_ok=True)


def test_without_appending_each_part_is_a_separate_file(
    bucket: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 130)
    folder = bucket.inside(tmp_path.name)
    made = TensorBoard(folder, {})
    for number in range(6):
        made.hear([evaluated(number, loss=number)])
    files = [payloads(folder.read(name)) for name in sorted(folder.files())]
    assert len(files) == 3
    assert all(name.startswith("events.out.tfevents.") for name in folder.files())
    assert [first.file_version for first, *_ in files] == ["brain.Event:2"] * 3
    assert [one.summary.value[0].simple_value for _, *rest in files for one in rest] == [0, 1, 2, 3, 4, 5]


def test_a_restart_is_written_as_other_writers_do(tmp_path: Path) -> None:
    made = TensorBoard(LocalFolder(tmp_path), {})
    made.hear([loss(0, 1.0), loss(1, 0.5)])
    made.hear([{**event("resumed", step=0, checkpoint=None, voided_to=1), "time": 7.5}, loss(1, 0.25)])
    *_, restart, last = payloads(only_file(tmp_path).read_bytes())
    theirs = Payload(wall_time=7.5, step=1, session_log=SessionLog(status=SessionLog.START))
    assert restart == theirs
    assert (last.step, last.summary.value[0].simple_value) == (1, 0.25)


def test_after_a_resumption_no_step_is_shown_twice(tmp_path: Path) -> None:
    made = TensorBoard(LocalFolder(tmp_path), {})
    made.hear([evaluated(0, accuracy=0.5), *(loss(number, float(number)) for number in range(3))])
    made.hear([evaluated(2, accuracy=0.75), event("resumed", step=0, checkpoint=None, voided_to=2), loss(1, 7.0)])
    assert shown(tmp_path, "train/loss") == [(0, 0.0), (1, 7.0)]
    assert shown(tmp_path, "evaluation/accuracy") == [(1, 0.5)]


def test_an_evaluation_of_an_earlier_process_still_counts_after_a_resumption(tmp_path: Path) -> None:
    made = TensorBoard(LocalFolder(tmp_path), {1: {"accuracy": 0.5}})
    made.hear([event("resumed", step=1, checkpoint=None, voided_to=4)])
    assert shown(tmp_path, "evaluation/accuracy") == [(2, 0.5)]


def test_metrics_that_the_disk_refuses_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = TensorBoard(LocalFolder(tmp_path), {})
    made.hear([loss(0, 1.5)])
    before = only_file(tmp_path).read_bytes()
    opened = Path.open

    def half(path: Path, mode: str) -> Any:
        with opened(path, mode) as file:
            file.write(b"half a record")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "open", half)
    with pytest.raises(StorageAway, match="disk full"):
        made.hear([loss(1, 1.0)])
    other = TensorBoard(LocalFolder(tmp_path), {})
    with pytest.raises(StorageAway, match="disk full"):
        other.hear([loss(1, 1.0)])
    monkeypatch.undo()
    assert only_file(tmp_path).read_bytes() == before
    made.hear([loss(1, 1.0)])
    assert [number for _, number, *_ in figures(tmp_path)] == [0, 1]


def test_watching_a_run_and_listening_to_it_load_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import raytrain_plus.observe.views.progress, raytrain_plus.observe.run_events\n"
        "from raytrain_plus.observe.trackers.trackers import check_installed\n"
        "import raytrain_plus.observe.trackers.listening\n"
        "check_installed(['mlflow'])\n"
        "sys.exit(', '.join({'torch', 'ray', 'tensorboardX', 'mlflow'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
