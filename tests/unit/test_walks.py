"""Every command of the pages is executed by a test, or the page says that it needs a cloud."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from raytrain_plus.job.yaml import load_job
from tests.pages import CLOUD, PAGES, Command, commands
from tests.walks import OTHERS, WALKS, executed

REPOSITORY = Path(__file__).parents[2]
STATED = [command for page in PAGES for command in commands(page, (REPOSITORY / page).read_text())]


def test_every_command_of_a_page_is_executed_or_needs_a_cloud() -> None:
    known = executed()
    assert len(STATED) > 50
    proven = [command for command in STATED if command.text in known or command.needs_cloud]
    for command in STATED:
        assert command in proven or any(map(command.mentions, proven)), (
            f"{command.page}:{command.line}: no test executes `{command.text}`; add it to tests/walks.py"
        )


def test_every_command_that_is_executed_is_on_a_page() -> None:
    stated = {command.text for command in STATED}
    for command, where in executed().items():
        assert command in stated, f"{where}: no page states `{command}`"


def test_what_is_executed_outside_the_walks_is_executed_by_a_test_that_exists() -> None:
    for command, where in OTHERS.items():
        file, _, name = where.partition("::")
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(), (command, where)


def test_at_most_two_walks_are_in_make_test() -> None:
    assert 1 <= sum(not walk.slow for walk in WALKS.values()) <= 2


def test_every_page_is_read() -> None:
    """A page that is not among `PAGES` would state commands that nothing executes."""
    ours = ("clusters", "examples", "jobs", "raytrain_plus", "tests")
    found = {file.relative_to(REPOSITORY).as_posix() for folder in ours for file in (REPOSITORY / folder).rglob("*.md")}
    assert found | {"README.md"} == set(PAGES)


PAGE = f"""# A page

Do `raytrain run
a.yaml`, not `raytrain`, `ray.init()` or `run(job)`.

```sh
make demo    # that's one
# nothing
   raytrain submit a.yaml \\
       --follow
aws iam --document '{{"a":
    "b"}}'
```

```
members     close the world
```

```python
make = 1  # `make bench`
```

## Far away

{CLOUD.replace(" need", chr(10) + "need")} Or `raytrain run`.

```sh
ray up a.yaml
```

## Near

1. In a list:

   ```sh
   ray start --head
   ```
"""


def test_the_commands_of_a_page() -> None:
    assert commands("README.md", PAGE) == [
        Command("README.md", 3, "raytrain run a.yaml", in_text=True, needs_cloud=False),
        Command("README.md", 7, "make demo", in_text=False, needs_cloud=False),
        Command("README.md", 9, "raytrain submit a.yaml --follow", in_text=False, needs_cloud=False),
        Command("README.md", 11, 'aws iam --document \'{"a": "b"}\'', in_text=False, needs_cloud=False),
        Command("README.md", 26, "raytrain run", in_text=True, needs_cloud=True),
        Command("README.md", 29, "ray up a.yaml", in_text=False, needs_cloud=True),
        Command("README.md", 37, "ray start --head", in_text=False, needs_cloud=False),
    ]


def test_only_the_beginning_of_a_command_in_a_sentence_mentions_it() -> None:
    run, *_, mention, _, _ = commands("README.md", PAGE)
    assert mention.mentions(run)
    assert not run.mentions(mention)
    assert not mention.mentions(Command("README.md", 1, "raytrain runs", in_text=False, needs_cloud=False))


@pytest.mark.parametrize(
    ("block", "told"),
    [("```\nraytrain run a.yaml\n```", "begins with ```sh"), ("```sh\nraytrain run 'a\n```", "does not end")],
)
def test_a_block_that_would_be_overlooked_is_an_error(block: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        commands("README.md", block)


FIRST = (REPOSITORY / "README.md").read_text()


def test_the_first_page_is_short_and_shows_the_picture_before_anything_else() -> None:
    assert len(FIRST.splitlines()) <= 150
    titles = ["examples/lost_worker.svg", "```sh\nmake demo", "## A task and a job", "| torchft", "## Read on"]
    at = [FIRST.index(title) for title in titles]
    assert at == sorted(at)


def test_the_task_and_the_job_of_the_first_page_are_valid(tmp_path: Path) -> None:
    """The job is the one of `jobs/`, but for what it says of workers; the task fits its columns."""
    [task] = re.findall(r"```python\n(import torch.*?)```", FIRST, re.DOTALL)
    [job] = re.findall(r"```yaml\n(.*?)```", FIRST, re.DOTALL)
    (tmp_path / "digits.yaml").write_text(job)
    shown, _ = load_job(str(tmp_path / "digits.yaml"))
    kept, _ = load_job(str(REPOSITORY / "jobs" / "digits.yaml"))
    assert (shown.task, shown.data, shown.epochs, shown.evaluate) == (kept.task, kept.data, kept.epochs, kept.evaluate)
    defined: dict[str, type] = {}
    exec(task, defined)
    digits = defined["Digits"]()
    batch = {"pixels": torch.zeros(4, 64), "label": torch.zeros(4, dtype=torch.long)}
    assert digits.loss(digits.model(), batch).item() > 0


def test_the_recovery_table_is_that_of_the_benchmarks() -> None:
    def rows(page: str) -> list[str]:
        return re.findall(r"(?m)^\| [^|]+\| \d+ \|.*\|.*\|.* %.*$", page)

    assert rows(FIRST) == rows((REPOSITORY / "tests" / "benchmarks" / "README.md").read_text())
    assert len(rows(FIRST)) == 6
