"""The digests of a task's source: which modules they cover, and that they are equal in every process."""

from __future__ import annotations

import doctest
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Data, Job
from raytrain_plus.job import task_source
from raytrain_plus.job.task_source import changed_modules, source_digests, whole_digest

FILES = {
    "mine/__init__.py": "",
    "mine/train.py": "import json, torch\nfrom . import lib\nfrom mine.parts.net import Net as N\nimport mine.unread\n",
    "mine/lib.py": "import mine.train\n",
    "mine/parts/__init__.py": "from .deep import x\n",
    "mine/parts/net.py": "def f():\n    import other\n",
    "mine/parts/deep.py": "x = 1\n",
    "mine/unread.py": "no python at all\n",
    "mine/unused.py": "",
    "other.py": "import raytrain_plus\n",
    "rows.py": "def double(rows): ...\n",
}


def job(task: str | type, **data: Any) -> Job:
    return Job(name="x", task=task, data=Data(path="d", batch_size=8, **data), steps=1)


def write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(task_source).failed == 0


def test_a_digest_covers_the_users_modules_that_the_task_imports(tmp_path: Path) -> None:
    write(tmp_path)
    found = source_digests(job("mine.train:T", transform="rows:double"), [tmp_path])
    assert sorted(found) == [
        "mine", "mine.lib", "mine.parts", "mine.parts.deep", "mine.parts.net", "mine.train", "other", "rows",
    ]  # fmt: skip
    # Elsewhere, and with an edited module that the task does not import: the same.
    write(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "mine" / "unused.py").write_text("x = 2\n")
    again = source_digests(job("mine.train:T", transform="rows:double"), [tmp_path / "elsewhere"])
    assert (again, whole_digest(again)) == (found, whole_digest(found))
    (tmp_path / "mine" / "parts" / "deep.py").write_text("x = 2\n")
    now = source_digests(job("mine.train:T"), [tmp_path])
    assert changed_modules(found, now) == ["mine.parts.deep"]
    assert whole_digest(now) != whole_digest(found)


def test_an_installed_task_counts_alone_and_a_missing_one_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert list(source_digests(job("mine.train:T"), [])) == ["mine.train"]
    assert source_digests(job("no_such_module:T"), [tmp_path]) == {}
    assert whole_digest({}) is None


def test_a_module_loaded_under_another_name_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    name = ".".join("x" * 40)
    module = types.ModuleType(name)
    module.__file__ = str(tmp_path / "mine" / "train.py")
    monkeypatch.setitem(sys.modules, name, module)
    assert list(source_digests(job(f"{name}:T"), [])) == [name]


NOTEBOOK = """
import sys
from pathlib import Path
import torch
import other
from raytrain_plus import Data, Job, Task
from raytrain_plus.job.task_source import source_digests

class Net(torch.nn.Module):
    width = {width}

RATES = {{"lr": {lr}}}

class Mine(Task):
    @torch.no_grad()
    def model(self):
        return Net() if "x" in {{"x", "y", "z"}} else other

    @staticmethod
    def rate():
        return [RATES["lr"] for _ in range({count})]

job = Job(name="x", task=Mine, data=Data(path="d", batch_size=8), steps=1)
print(source_digests(job, [Path(sys.argv[1])]))
"""


@pytest.mark.slow
def test_a_class_of_a_notebook_is_told_by_its_code_and_the_values_that_it_uses(tmp_path: Path) -> None:
    write(tmp_path)

    def digests(moved: str = "", **values: Any) -> dict[str, str]:
        text = moved + NOTEBOOK.format(**{"width": 3, "lr": 0.1, "count": 2, **values})
        program = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{text}", str(tmp_path)]
        out = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
        return dict(eval(out))

    first = digests()
    assert len(first) == 2
    assert "other" in first
    assert digests(moved="\n# moved down\n") == first
    for change in ({"width": 4}, {"lr": 0.2}, {"count": 3}):
        assert changed_modules(first, digests(**change)) == ["the code of the notebook"]
    (tmp_path / "other.py").write_text("x = 1\n")
    assert changed_modules(first, digests()) == ["other"]
