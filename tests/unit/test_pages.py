"""The pages say what is there: every module is on the map, every word of the glossary is used."""

import os
import re
import subprocess
from pathlib import Path

from raytrain_plus.job.sameness import Kept, kept_settings
from raytrain_plus.job.settings import Job

PACKAGE = Path(__file__).parents[2] / "raytrain_plus"
PAGE = (PACKAGE / "README.md").read_text()
# What `raytrain init` writes is no module of this package.
SOURCES = sorted(file for file in PACKAGE.rglob("*.py") if "templates" not in file.parts)


def section(title: str) -> str:
    return re.split(r"(?m)^## ", PAGE.partition(f"## {title}\n")[2])[0]


def test_the_map_names_every_module_and_no_other() -> None:
    drawn = PAGE.partition("## ")[0]
    for file in SOURCES:
        name = file.parent.name if file.stem == "__init__" else file.stem
        if name not in ("__main__", "raytrain_plus"):
            assert re.search(rf"(?<![\w_]){name}(?![\w_])", drawn), f"{file.relative_to(PACKAGE)} is not on the map"
    packages = {file.parent.name for file in SOURCES}
    for name in re.findall(r"(?m)^(\w+)/", drawn):
        assert name in packages


def test_the_glossary_is_short_and_each_of_its_words_is_used() -> None:
    words = re.findall(r"(?m)^\| (\w[\w ]*) \| ", section("Words of this project"))[1:]
    assert 10 < len(words) <= 30
    assert words == sorted(words)
    code = "\n".join(file.read_text() for file in SOURCES)
    for word in words:
        assert re.search(rf"(?i)\b{word}", code), f"nothing is called {word}"


def test_no_page_cites_a_document_that_is_not_here() -> None:
    root = PACKAGE.parent
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    pages = [file for file in listed if file.endswith((".md", ".py", ".yaml"))]
    for page in pages:
        lines = [line for line in (root / page).read_text().splitlines() if ".md" in line]
        for cited in re.findall(r"[\w./-]*\b[\w-]+\.md\b", "\n".join(lines)):
            names = {cited.removeprefix("./"), os.path.normpath(Path(page).parent / cited)}
            assert any(name.endswith(tuple(names)) for name in listed), f"{page} cites {cited}"


def test_every_module_that_the_map_refers_to_exists() -> None:
    cited = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?`", PAGE.partition("## ")[2]))
    assert len(cited) > 20
    for name in cited:
        found = [base / name for base in (PACKAGE, PACKAGE.parent)]
        assert any(path.is_dir() or path.with_suffix(".py").is_file() for path in found), f"the map cites {name}"


def test_the_page_of_jobs_lists_what_makes_two_jobs_the_same() -> None:
    jobs = (PACKAGE.parent / "jobs" / "recovery.md").read_text()
    listed = re.findall(r"`([a-z_.]+)`", jobs.partition("Two jobs are the same if")[2].partition("`raytrain run`")[0])
    keys = {key: kept for key, kept, _ in kept_settings(Job)}
    with_others = [Kept.WITH_PIPEDREAM, Kept.WITH_COMPILE, Kept.ON_GPUS]
    assert listed == [
        *(key for key, kept in keys.items() if kept in (Kept.ALWAYS, Kept.UNLESS_RESUMED)),
        *(key for one in with_others for key, kept in keys.items() if kept is one),
    ]
    left = [key for key, kept in keys.items() if kept is Kept.UNLESS_RESUMED]
    *first, last = (f"`{key}`" for key in left)
    assert f"`resume` may change {', '.join(first)} and {last}" in " ".join(jobs.split())
