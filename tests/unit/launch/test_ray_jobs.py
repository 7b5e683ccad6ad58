"""Which files a submitted job uploads, and what it refuses to upload."""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

from raytrain_plus import Data, Evaluate, InputError, Job
from raytrain_plus.launch.ray_jobs import (
    check_sendable,
    check_shown,
    environments,
    largest,
    left_out,
    unneeded_by,
    unneeded_to_resume,
)
from tests.support.tokenizers import save


def job(**changes: object) -> Job:
    data = Data(
        path=str(changes.pop("path", "data/train")),
        batch_size=8,
        prepare=changes.pop("prepare", None),  # type: ignore[arg-type]
        tokenizer=changes.pop("tokenizer", None),  # type: ignore[arg-type]
    )
    return Job(name="job", task="tasks:Net", steps=1, data=data, **changes)  # type: ignore[arg-type]


def sent(folder: Path, unneeded: Sequence[str] = ()) -> list[str]:
    """Return the files that Ray puts into the package of a folder."""
    package = folder.parent / f"package-{secrets.token_hex(4)}.zip"
    create_package(str(folder), package, include_gitignore=True, excludes=left_out(folder, unneeded))
    with zipfile.ZipFile(package) as opened:
        return sorted(name for name in opened.namelist() if not name.endswith("/"))


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def test_data_and_runs_are_unneeded(tmp_path: Path) -> None:
    made = job(prepare="tasks:prepare", evaluate=Evaluate(path="data/held_out", every_steps=2), storage="s3://b/runs")
    assert unneeded_by(made, tmp_path) == ["/data/train/**/*.parquet", "/data/held_out/**/*.parquet"]
    assert unneeded_by(job(path="/share/data", storage="../elsewhere"), tmp_path) == []
    assert unneeded_by(job(path="/share/data"), tmp_path) == ["/runs/*/"]
    # If the storage is the folder itself, its other folders are the user's.
    assert unneeded_by(job(path="s3://b/data", storage=str(tmp_path)), tmp_path) == []


@pytest.mark.parametrize("place", ["data/x", ".", "data/x/0.parquet"])
def test_data_inside_the_folder_is_not_sent(tmp_path: Path, place: str) -> None:
    """Data inside the folder is not sent: with an absolute path, or through a link into or out of the folder."""
    folder = filled(tmp_path / "project", "task.py", "data/x/0.parquet", "data/x.py")
    assert sent(folder, unneeded_by(job(path=str(folder / place)), folder)) == ["data/x.py", "task.py"]
    (tmp_path / "link").symlink_to(folder)
    assert sent(folder, unneeded_by(job(path=str(tmp_path / "link" / place)), folder)) == ["data/x.py", "task.py"]
    filled(tmp_path / "share", "far/0.parquet")
    (folder / "share").symlink_to(tmp_path / "share")
    assert "share/far/0.parquet" not in sent(folder, unneeded_by(job(path=str(folder / "share/far")), folder))


@pytest.mark.parametrize("pattern", ["data/*/*.parquet", "data/**/*.parquet", "data/[[]x]", "data/*", "d*/?x?"])
def test_data_that_a_pattern_names_is_not_sent(tmp_path: Path, pattern: str) -> None:
    folder = filled(tmp_path / "project", "task.py", "data/[x]/0.parquet", "data/x.py")
    assert sent(folder, unneeded_by(job(path=str(folder / pattern)), folder)) == ["data/x.py", "task.py"]


def test_a_folder_with_the_characters_of_a_pattern_is_not_sent(tmp_path: Path) -> None:
    folder = filled(tmp_path / "project", "task.py", "data[x]/0.parquet", "datax/kept.parquet")
    assert sent(folder, unneeded_by(job(path="data[x]"), folder)) == ["datax/kept.parquet", "task.py"]
    assert sent(folder, unneeded_by(job(path="data[x]/*.parquet"), folder)) == ["datax/kept.parquet", "task.py"]


def test_a_resumed_run_sends_no_data_either(tmp_path: Path) -> None:
    folder = filled(tmp_path / "project", "task.py", "runs/old/model", "made/0.parquet")
    storage = filled(tmp_path / "runs", "job/job.yaml")
    written = {"task": "t:T", "steps": 1, "data": {"path": "made", "batch_size": 8, "prepare": "t:p"}}
    (storage / "job" / "job.yaml").write_text(json.dumps(written))
    assert sent(folder, unneeded_to_resume("job", str(storage), folder)) == ["task.py"]
    # If only the cluster sees the run, its data is not known here.
    unseen = unneeded_to_resume("job", str(tmp_path / "elsewhere"), folder)
    assert sent(folder, unseen) == ["made/0.parquet", "task.py"]


def test_environments_are_recognised_by_their_content(tmp_path: Path) -> None:
    names = ["env/pyvenv.cfg", "env/lib/a.py", "[my] conda/conda-meta/history", "[my] conda/lib/a.py"]
    folder = filled(tmp_path / "project", "task.py", "lib/b.py", "training/c.py", *names)
    assert [one.name for one in environments(folder)] == ["[my] conda", "env"]
    assert sent(folder) == ["lib/b.py", "task.py", "training/c.py"]
    assert "env" not in largest(folder)


def test_an_environment_named_like_a_folder_of_this_package_excludes_none_of_it(tmp_path: Path) -> None:
    """Ray applies the folder's exclude patterns also to an uploaded module."""
    folder = filled(tmp_path / "project", "training/pyvenv.cfg", "training/lib/a.py")
    assert sent(folder) == []
    package = filled(tmp_path / "raytrain_plus", "training/step/loop.py", "task.py")
    create_package(str(package), tmp_path / "along.zip", include_gitignore=True, excludes=left_out(folder))
    with zipfile.ZipFile(tmp_path / "along.zip") as opened:
        assert sorted(opened.namelist()) == ["task.py", "training/step/loop.py"]


def test_the_job_file_must_be_inside_the_working_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "project" / "jobs" / "a.yaml", tmp_path / "b.yaml"
    assert check_sendable(job(path="/share"), inside, tmp_path / "project") == "jobs/a.yaml"
    with pytest.raises(InputError, match="not inside the working directory"):
        check_sendable(job(path="/share"), outside, tmp_path / "project")


def test_relative_data_is_refused(tmp_path: Path) -> None:
    for good in (job(path="s3://bucket/data"), job(prepare="tasks:prepare")):
        check_sendable(good, tmp_path / "job.yaml", tmp_path)
    with pytest.raises(InputError, match=r"data\.path: data/train.*relative"):
        check_sendable(job(), tmp_path / "job.yaml", tmp_path)


def test_the_largest_entries_are_named(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "one").write_bytes(b"x" * 3000)
    (tmp_path / "small").write_bytes(b"x")
    assert largest(tmp_path).startswith("big (")
    assert largest(tmp_path).count("(") == 2


def test_commands_with_credentials_are_refused() -> None:
    check_shown(["run", "job.yaml", "--set", "storage=s3://bucket/runs?region=eu-west-1"])
    with pytest.raises(InputError) as error:
        check_shown(["run", "job.yaml", "--set", "storage=s3://KEY:SECRET@bucket/runs"])
    assert "KEY:SECRET" not in str(error.value)


def test_relative_held_out_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluate\.path: data/held_out"):
        check_sendable(
            job(path="/share", evaluate=Evaluate(path="data/held_out", every_steps=2)), tmp_path / "a.yaml", tmp_path
        )


def test_a_tokenizer_inside_the_working_directory_is_sent(tmp_path: Path) -> None:
    folder, file = tmp_path / "project", tmp_path / "project" / "a.yaml"
    folder.mkdir()
    save(folder / "saved")
    wished = job(path="/share", tokenizer="saved")
    assert check_sendable(wished, file, folder) == "a.yaml"
    assert sent(folder, unneeded_by(wished, folder)) == ["saved/tokenizer.json"]
    beside = job(path=str(folder), tokenizer="saved/tokenizer.json")
    assert sent(folder, unneeded_by(beside, folder)) == ["saved/tokenizer.json"]
    save(tmp_path / "outside")
    for path, words in (
        ("../outside", "outside the working directory, and is not sent"),
        ("runs/saved", "inside `storage`, and is not sent"),
        ("nowhere", "there is no such file or folder"),
    ):
        with pytest.raises(InputError, match=words):
            check_sendable(job(path="/share", tokenizer=path), file, folder)
    check_sendable(job(path="/share", tokenizer=str(tmp_path / "outside")), file, folder)
    check_sendable(job(prepare="t:p", tokenizer="nowhere"), file, folder)
