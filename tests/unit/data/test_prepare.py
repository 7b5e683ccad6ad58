"""Missing data is prepared, or refused with the place and the reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.data.prepare import check_preparable, prepare
from raytrain_plus.errors import DataError, TaskError


def test_a_path_that_cannot_be_accessed_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x: cannot be accessed: File name too long"):
        prepare("a:b", tmp_path / ("x" * 300), [])


def test_a_function_that_exits_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ending_prepare.py").write_text("import sys\ndef make(folder, name):\n    sys.exit('no network')\n")
    with pytest.raises(TaskError, match=r"sys.exit(.|\n)*data.prepare raised SystemExit: no network"):
        prepare("ending_prepare:make", tmp_path / "data", [tmp_path])
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and "data" in path.name]


def test_a_function_that_raises_as_a_signal_does_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "stopping_prepare.py").write_text("def make(folder, name):\n    raise KeyboardInterrupt('enough')\n")
    with (
        ThreadPoolExecutor(max_workers=1) as thread,
        pytest.raises(TaskError, match=r"data\.prepare raised KeyboardInterrupt: enough"),
    ):
        thread.submit(prepare, "stopping_prepare:make", tmp_path / "data", [tmp_path]).result()


@pytest.mark.parametrize(
    ("path", "held_out", "where"), [("data/*.parquet", "held_out", "data.path"), ("data", "a[b]", "evaluate.path")]
)
def test_a_pattern_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, held_out: str, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "making.py").write_text("def make(folder, name):\n    raise AssertionError\n")
    data = Data(path=path, prepare="making:make", batch_size=8)
    job = Job(name="x", task="a:B", data=data, steps=1, evaluate=Evaluate(path=held_out, every_steps=1))
    with pytest.raises(DataError, match="cannot write to a path with wildcards") as caught:
        check_preparable(job, [tmp_path])
    assert caught.value.where == f"{where}: {path if where == 'data.path' else held_out}"
    assert str(tmp_path) in caught.value.remedy
    with pytest.raises(DataError, match="cannot write to a path with wildcards"):
        prepare("making:make", tmp_path / "deep" / "*.parquet", [tmp_path])
    assert {found.name for found in tmp_path.iterdir()} <= {"making.py", "__pycache__"}


def test_data_that_exists_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "data[1]").mkdir()
    prepare("no_module:make", tmp_path / "data[1]", [])
    data = Data(path=str(tmp_path / "data[1]"), prepare="os.path:join", batch_size=8)
    check_preparable(Job(name="x", task="a:B", data=data, steps=1), [])
