"""Find what follows the loop of a training function, which is never executed. Pure."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def unreached_line(function: Callable[..., Any]) -> int | None:
    """Return the line, in its file, of the first statement behind the loop over batches; None if there is none.

    None, too, for a function without source, as of a console.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        [defined] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    line = next(_behind(defined), None)
    return None if line is None else first + line - 1


def _behind(node: ast.AST) -> Iterator[int]:
    """Yield the lines of the statements behind the loop inside a statement, the nearest first."""
    for block in (getattr(node, name, []) for name in ("body", "orelse")):
        for number, statement in enumerate(block):
            if _has_loop(statement):
                if not _is_loop(statement):
                    yield from _behind(statement)
                yield from (one.lineno for one in block[number + 1 :])


def _has_loop(node: ast.AST) -> bool:
    # To define a function is not to run it.
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    return _is_loop(node) or any(map(_has_loop, ast.iter_child_nodes(node)))


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, ast.For) and any(
        isinstance(one, ast.Attribute) and one.attr == "batches" for one in ast.walk(node.iter)
    )
