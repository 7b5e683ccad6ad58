"""The templates: complete, installed with the package, and refused if a package is missing."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from raytrain_plus.begin.catalogue import TEMPLATES, check_installed, next_steps
from raytrain_plus.begin.write import FOLDER
from raytrain_plus.errors import InputError
from raytrain_plus.job.yaml import load_job

REPOSITORY = Path(__file__).parents[3]


def test_every_template_has_exactly_its_files_and_each_is_in_the_wheel() -> None:
    there = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.*") if file.suffix != ".pyc"}
    assert there == {f"{name}/{file}" for name, template in TEMPLATES.items() for file in template.files} | {
        "pytest.ini"
    }
    [listed] = re.findall(r'(?m)^"raytrain_plus.begin" = \[(.*)\]$', (REPOSITORY / "pyproject.toml").read_text())
    patterns = re.findall(r'"([^"]+)"', listed)
    in_wheel = {str(file.relative_to(FOLDER)) for pattern in patterns for file in FOLDER.parent.glob(pattern)}
    assert there <= in_wheel


def test_the_template_digits_is_the_example() -> None:
    assert (FOLDER / "digits" / "digits.py").read_text() == (REPOSITORY / "examples" / "digits.py").read_text()
    job = (REPOSITORY / "jobs" / "digits.yaml").read_text()
    assert (FOLDER / "digits" / "digits.yaml").read_text() == job.replace("examples.", "").replace("jobs/", "")


JOBS = [name for name, template in TEMPLATES.items() if not template.script]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_a_template_trains_on_while_one_worker_lives(name: str) -> None:
    stem = TEMPLATES[name].stem
    job, _ = load_job(FOLDER / name / f"{stem}.yaml")
    assert (job.name, job.workers.min, job.workers.max) == (stem, 1, 2)
    assert job.evaluate is not None
    assert f"raytrain run {stem}.yaml" in (FOLDER / name / f"{stem}.yaml").read_text()


def test_the_jobs_of_the_repository_train_on_while_one_worker_lives() -> None:
    for file in (REPOSITORY / "jobs").glob("*.yaml"):
        assert load_job(file)[0].workers.min == 1, file


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_task_hides_a_library(name: str) -> None:
    stem = TEMPLATES[name].stem
    assert stem not in {module for template in TEMPLATES.values() for module in template.needs} | {"ray", "torch"}
    assert stem not in sys.stdlib_module_names
    assert find_spec(f"tests.{stem}") is None


def test_a_missing_package_is_one_sentence_with_the_command() -> None:
    check_installed("transformers", lambda module: True)
    check_installed("gpt", lambda module: False)
    with pytest.raises(InputError) as told:
        check_installed("transformers", lambda module: module != "transformers")
    assert str(told.value) == (
        "--template transformers: the template needs transformers, not installed here\n  fix: pip install transformers"
    )
    with pytest.raises(InputError, match="pip install scikit-learn"):
        check_installed("digits", lambda module: False)


def test_the_next_commands_are_those_of_the_written_job() -> None:
    first, *lines = next_steps("vision", Path("new"))
    assert first == "new: wrote shapes.py, shapes.yaml, test_shapes.py; next:"
    commands = [line.partition("#")[0].strip() for line in lines]
    assert commands[:4] == ["cd new", "pytest", "raytrain validate shapes.yaml", "raytrain run shapes.yaml"]
    assert commands[4].startswith("raytrain verify shapes.yaml ")
    assert commands[4].endswith(" --kill 1")
    assert commands[5] == "raytrain export shapes --to model.safetensors"
    first, *lines = next_steps("trainer", Path("new"))
    assert first == "new: wrote reviews.py, test_reviews.py; next:"
    commands = [line.partition("#")[0].strip() for line in lines]
    assert commands[1:3] == ["pytest", "raytrain run reviews.py --set workers.max=2"]
    assert commands[4] == "raytrain export reviews/run --format transformers --to model"
