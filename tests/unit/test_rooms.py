"""A reader finds any module by its name: names are there once, and folders are small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "raytrain_plus"
# What `raytrain init` writes is no module of this package.
MODULES = sorted(
    file
    for file in PACKAGE.rglob("*.py")
    if "templates" not in file.parts and file.stem not in ("__init__", "__main__")
)
MOST = 16


def test_no_folder_has_more_modules_than_a_reader_can_overlook() -> None:
    counts = Counter(file.parent.relative_to(PACKAGE).as_posix() for file in MODULES)
    assert len(counts) > 40
    assert {folder: count for folder, count in counts.items() if count > MOST} == {}


def test_no_name_of_a_module_is_there_twice() -> None:
    named = Counter(file.stem for file in MODULES)
    assert [name for name, count in named.items() if count > 1] == []
    # A folder may have the name of its main module, and of no other.
    folders = {file.parent for file in MODULES if file.parent != PACKAGE}
    assert [file for file in MODULES for folder in folders if folder.name == file.stem and file.parent != folder] == []
    assert max(Counter(folder.name for folder in folders).values()) == 1


def test_no_public_class_is_there_twice() -> None:
    found: dict[str, list[str]] = {}
    for file in MODULES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file.relative_to(PACKAGE).as_posix())
    assert len(found) > 200
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_each_folder_says_what_it_is_for() -> None:
    for file in PACKAGE.rglob("__init__.py"):
        if "templates" not in file.parts:
            assert ast.get_docstring(ast.parse(file.read_text())), file


def test_no_test_module_imports_from_another() -> None:
    tests = PACKAGE.parent / "tests"
    for file in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                named = [(node.module or "").rpartition(".")[2], *(one.name for one in node.names)]
                modules = [name for name in named if name.startswith("test_")]
                assert not modules, f"{file.relative_to(tests)} imports from {modules}"


def test_the_controller_loads_no_torch() -> None:
    """Its process starts again while workers train: torch would take most of that time."""
    loaded = "import sys, raytrain_plus.controller.controller_actor; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "False\n"
