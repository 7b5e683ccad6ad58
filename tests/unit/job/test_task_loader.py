"""Import what a job names, and attribute the failures."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from raytrain_plus import RunFacts, Task
from raytrain_plus.errors import TaskError
from raytrain_plus.job import task_loader
from raytrain_plus.job.task_loader import as_task_error, build_task, load_function, load_task, trim_traceback


def write(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / f"{name}.py").write_text(text)
    return name


def failure(spec: str, tmp_path: Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(spec, [tmp_path])
    return str(caught.value)


def test_a_task_is_found_beside_the_job(tmp_path: Path) -> None:
    write(
        tmp_path,
        "found_task",
        "from raytrain_plus import Task\nclass Mine(Task):\n    def __init__(self, width=1): self.width = width\n",
    )
    cls = load_task("found_task:Mine", [tmp_path])
    assert build_task(cls, {"width": 3}).width == 3  # type: ignore[attr-defined]


class Sized(Task):
    def __init__(self, width: int = 1, *, depth: int = 1) -> None:
        if width < 0:
            raise TypeError("a negative width")


class Open(Task):
    def __init__(self, **more: Any) -> None:
        self.more = more


class Needs(Task):
    def __init__(self, width: int) -> None:
        self.width = width


class Bare(Task):
    pass


@pytest.mark.parametrize(
    ("cls", "args", "said"),
    [
        (
            Sized,
            {"depth": 2, "widht": 3},
            "args.widht: Sized(...) takes no argument 'widht'\n  expected: one of width, depth\n"
            "  fix: did you mean 'width'?",
        ),
        (
            Sized,
            {"zz": 2, "yy": 3},
            "args.zz: Sized(...) takes no argument 'zz' and no 'yy'\n  expected: one of width, depth\n  fix: remove it",
        ),
        (Bare, {"zz": 2}, "args.zz: Bare(...) takes no argument 'zz'\n  expected: no args\n  fix: remove it"),
    ],
)
def test_an_argument_that_the_constructor_does_not_take(cls: type[Task], args: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_task(cls, args)
    assert str(caught.value) == said


FACTS = RunFacts(total_steps=300, batch_size=48)


@dataclass(frozen=True)
class Frozen(Task):
    width: int = 1


def test_a_task_is_told_of_its_run() -> None:
    assert build_task(Open, {"width": 3}, FACTS).run is FACTS
    assert build_task(Frozen, {"width": 3}, FACTS).run == RunFacts(total_steps=300, batch_size=48)
    pickled = cloudpickle.dumps(build_task(Open, {}, FACTS))
    assert cloudpickle.loads(pickled).run == FACTS


def test_outside_a_run_the_user_says_what_it_is() -> None:
    task = build_task(Open, {})
    with pytest.raises(AttributeError, match=r"Open.run is not known .* set it first: task.run = RunFacts\("):
        _ = task.run
    task.run = FACTS
    assert task.run is FACTS


class Method(Task):
    def run(self) -> None:  # type: ignore[override]
        pass


class Assigned(Task):
    def __init__(self) -> None:
        self.run = "mine"  # type: ignore[assignment]


@pytest.mark.parametrize("cls", [Method, Assigned])
def test_a_task_with_an_attribute_run_of_its_own_is_refused(cls: type[Task]) -> None:
    with pytest.raises(TaskError, match=r"holds the facts of (the|its) run[\s\S]*another name"):
        build_task(cls, {}, FACTS)


def test_other_mistakes_of_a_constructor_show_its_frames() -> None:
    assert build_task(Open, {"widht": 3}).more == {"widht": 3}  # type: ignore[attr-defined]
    assert isinstance(build_task(Bare, {}), Bare)
    with pytest.raises(TaskError, match=r"Sized\(...\) raised TypeError: a negative width[\s\S]*given: width"):
        build_task(Sized, {"width": -1})
    with pytest.raises(TaskError) as caught:
        build_task(Needs, {})
    assert str(caught.value).count("missing 1 required positional argument: 'width'") == 1


def test_a_missing_module_says_where_it_was_looked_for(tmp_path: Path) -> None:
    text = failure("nowhere_at_all:Mine", tmp_path)
    assert "module 'nowhere_at_all' not found" in text
    assert str(tmp_path) in text
    with pytest.raises(TaskError) as caught:
        load_function("nowhere_at_all:made", [tmp_path, tmp_path])
    assert caught.value.expected == f"module:name, importable from {tmp_path}"


def test_a_missing_class_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "near_task", "from raytrain_plus import Task\nclass Digits(Task): pass\n")
    assert "did you mean 'Digits'?" in failure("near_task:Digit", tmp_path)


def test_a_class_that_is_not_a_task_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "odd_task", "class Mine: pass\n")
    text = failure("odd_task:Mine", tmp_path)
    assert "is the class Mine" in text
    assert "derived from raytrain_plus.Task" in text


def test_a_module_that_raises_shows_only_the_users_frames(tmp_path: Path) -> None:
    write(tmp_path, "raising_task", "def deep():\n    return 1 / 0\ndeep()\n")
    text = failure("raising_task:Mine", tmp_path)
    assert "return 1 / 0" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "importlib" not in text
    assert "task_loader.py" not in text


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_task_that_was_installed_shows_its_own_frames(tmp_path: Path, folder: str) -> None:
    name = f"installed_task_{folder[:4]}"
    (tmp_path / folder).mkdir()
    text = "import torch\ndef deep():\n    return torch.nn.Linear(1, 1)(1)\ndeep()\n"
    write(tmp_path / folder, name, text)
    text = failure(f"{name}:Mine", tmp_path / folder)
    assert "Traceback (without raytrain_plus and torch):" in text
    assert text.count(f"{name}.py") == 2
    assert "torch.nn.Linear(1, 1)(1)" in text
    assert "importlib" not in text
    assert "task_loader.py" not in text
    assert "linear.py" not in text


def raised_in(file: Path, inner: str) -> Exception:
    """Return an error raised by code in `file`."""
    space: dict[str, object] = {}
    exec(compile(f"import json\ndef call():\n    {inner}\n", str(file), "exec"), space)
    with pytest.raises(Exception) as caught:
        space["call"]()  # type: ignore[operator]
    return caught.value


def test_frames_are_attributed_by_whole_folder_names(tmp_path: Path) -> None:
    beside = Path(task_loader.__file__).parents[2]
    for file in (beside / "raytrain_plus_mine" / "a.py", tmp_path / "my-site-packages" / "a.py"):
        text = trim_traceback(raised_in(file, "json.loads('{')"))
        assert f'File "{file}", line 3' in text
        assert "your code only" in text
        assert "decoder.py" not in text
    ours = beside / "raytrain_plus" / "a.py"
    assert str(ours) not in trim_traceback(raised_in(ours, "1 / 0"))


@pytest.mark.parametrize("text", ["import sys\nsys.exit('no GPU here')\n", "raise SystemExit('no GPU here')\n"])
def test_a_module_that_ends_the_process_is_a_mistake(tmp_path: Path, text: str) -> None:
    name = write(tmp_path, f"ending_task_{len(text)}", text)
    said = failure(f"{name}:Mine", tmp_path)
    assert f"importing '{name}' raised SystemExit: no GPU here" in said
    assert f"{name}.py" in said


def test_a_constructor_that_ends_the_process_is_a_mistake() -> None:
    class Ending(Task):
        def __init__(self) -> None:
            sys.exit(3)

    with pytest.raises(TaskError, match=r"Ending\(...\) raised SystemExit: 3"):
        build_task(Ending, {})


def on_a_thread(work: Callable[[], object]) -> object:
    """Run `work` as a worker does, whose main thread is Ray's."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_no_exception_of_the_task_passes_for_a_signal(tmp_path: Path, kind: type[BaseException]) -> None:
    class Ending(Task):
        def __init__(self) -> None:
            raise kind("no width")

    def built() -> None:
        with as_task_error("Mine cannot be built", "task: a:Mine"):
            raise kind("no layer")

    name = write(tmp_path, f"raises_{kind.__name__}", f"raise {kind.__name__}('no GPU')\n")
    with pytest.raises(TaskError, match=f"importing '{name}' raised {kind.__name__}: no GPU"):
        on_a_thread(lambda: load_task(f"{name}:Mine", [tmp_path]))
    with pytest.raises(TaskError, match=rf"Ending\(...\) raised {kind.__name__}: no width"):
        on_a_thread(lambda: build_task(Ending, {}))
    with pytest.raises(TaskError, match=f"Mine cannot be built: {kind.__name__}: no layer"):
        on_a_thread(built)


def test_an_interrupt_of_the_main_thread_is_no_error_of_the_task(tmp_path: Path) -> None:
    """There Ctrl+C ends the command, and Ray cancels a call."""
    name = write(tmp_path, "interrupted_task", "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        load_task(f"{name}:Mine", [tmp_path])


def test_a_class_from_python_must_be_a_task_too() -> None:
    class Mine:
        pass

    with pytest.raises(
        TaskError, match=r"Mine is the class Mine\n  expected: a class derived from raytrain_plus\.Task"
    ):
        load_task(Mine, [])
    assert load_task(Task, []) is Task


def test_a_syntax_error_is_placed(tmp_path: Path) -> None:
    write(tmp_path, "broken_task", "x = 1\nclass (\n")
    assert 'broken_task.py", line 2' in failure("broken_task:Mine", tmp_path)


def test_a_module_with_a_missing_import_is_the_users_mistake(tmp_path: Path) -> None:
    write(tmp_path, "needing_task", "import surely_not_installed\n")
    assert "No module named 'surely_not_installed'" in failure("needing_task:Mine", tmp_path)


def test_load_function(tmp_path: Path) -> None:
    write(tmp_path, "function_task", "def f(): return 7\nx = 1\n")
    assert load_function("function_task:f", [tmp_path])() == 7
    with pytest.raises(TaskError, match="is of type int"):
        load_function("function_task:x", [tmp_path])
