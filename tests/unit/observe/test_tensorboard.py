"""TensorBoard's files, read back by another implementation of the format."""

import doctest
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event as Payload
from tensorboardX.proto.event_pb2 import SessionLog

from raytrain_plus.observe.trackers import tensorboard as module
from raytrain_plus.observe.trackers.event_metrics import MetricValue
from raytrain_plus.observe.trackers.tensorboard import FLUSH_S, Scalars
from raytrain_plus.storage.folders import growing
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.support.events import payloads


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("events.out.tfevents.*")
    return file


def figures(folder: Path) -> list[tuple[str, int, float, float]]:
    first, *rest = payloads(only_file(folder).read_bytes())
    assert first.file_version == "brain.Event:2"
    return [(one.summary.value[0].tag, one.step, one.summary.value[0].simple_value, one.wall_time) for one in rest]


def loss(step: int, value: float) -> MetricValue:
    return MetricValue("train/loss", value, step, 0.0)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_figures_come_back_under_their_names_and_steps(tmp_path: Path) -> None:
    scalars = Scalars(LocalFolder(tmp_path / "tensorboard"))
    scalars.add([])
    scalars.add([MetricValue("evaluation/größe", 0.25, 0, 0.0), MetricValue("train/loss", 5.25, 0, 1_700_000_000.25)])
    scalars.add([MetricValue("train/loss", 4.5, 70_000, 0.0)])
    scalars.end("finished")
    scalars.end("finished")
    assert figures(tmp_path / "tensorboard") == [
        ("evaluation/größe", 0, 0.25, 0.0),
        ("train/loss", 0, 5.25, 1_700_000_000.25),
        ("train/loss", 70_000, 4.5, 0.0),
    ]


@pytest.mark.parametrize(("value", "read"), [(math.inf, math.inf), (1e300, math.inf), (-1e300, -math.inf)])
def test_a_value_out_of_range_is_infinite(tmp_path: Path, value: float, read: float) -> None:
    scalars = Scalars(LocalFolder(tmp_path))
    scalars.add([loss(0, value)])
    scalars.end("finished")
    assert figures(tmp_path)[0][2] == read


def test_a_loss_that_is_not_finite_is_written_as_such(tmp_path: Path) -> None:
    scalars = Scalars(LocalFolder(tmp_path))
    scalars.add([loss(0, math.nan)])
    scalars.end("finished")
    assert math.isnan(figures(tmp_path)[0][2])


def test_values_are_visible_while_the_run_continues(tmp_path: Path) -> None:
    now = 100.0
    scalars = Scalars(LocalFolder(tmp_path), clock=lambda: now)
    scalars.add([loss(0, 1.5)])
    now += FLUSH_S
    scalars.add([loss(1, 1.0)])
    assert [step for _, step, *_ in figures(tmp_path)][-1] == 1
    scalars.end("finished")


def test_without_appending_each_part_is_a_separate_file(
    bucket: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "PART_BYTES", 130)
    folder = bucket.inside(tmp_path.name)
    scalars = Scalars(folder)
    for number in range(6):
        scalars.add([MetricValue("evaluation/loss", number, number + 1, 0.0)])
    scalars.end("finished")
    files = [payloads(folder.read(name)) for name in sorted(folder.files())]
    assert len(files) == 3
    assert all(name.startswith("events.out.tfevents.") for name in folder.files())
    assert [first.file_version for first, *_ in files] == ["brain.Event:2"] * 3
    assert [one.summary.value[0].simple_value for _, *rest in files for one in rest] == [0, 1, 2, 3, 4, 5]


def test_a_restart_is_written_as_other_writers_do(tmp_path: Path) -> None:
    scalars = Scalars(LocalFolder(tmp_path))
    scalars.add([loss(0, 1.0), loss(1, 0.5)])
    scalars.restart(7.5, 1)
    scalars.add([loss(1, 0.25)])
    scalars.end("finished")
    *_, restart, last = payloads(only_file(tmp_path).read_bytes())
    theirs = Payload(wall_time=7.5, step=1, session_log=SessionLog(status=SessionLog.START))
    assert restart == theirs
    assert (last.step, last.summary.value[0].simple_value) == (1, 0.25)


def test_a_run_without_metrics_leaves_no_file(tmp_path: Path) -> None:
    Scalars(LocalFolder(tmp_path / "tensorboard")).end("failed")
    assert not (tmp_path / "tensorboard").exists()


def test_watching_a_run_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "import raytrain_plus.observe.views.progress, raytrain_plus.observe.run_events\n"
        "from raytrain_plus.observe.trackers.trackers import Trackers, check_installed\n"
        "from raytrain_plus.storage.folders.local import LocalFolder\n"
        "check_installed(['mlflow'])\n"
        "trackers = Trackers(LocalFolder(pathlib.Path(sys.argv[1])))\n"
        "trackers.add({'kind': 'evaluated', 'time': 1.0, 'step': 0, 'metrics': {'loss': 1.0}})\n"
        "trackers.close()\n"
        "sys.exit(', '.join({'torch', 'ray', 'tensorboardX', 'mlflow'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
