"""Advice on what torch raises in passes that are compiled or computed again."""

from __future__ import annotations

import pytest

from raytrain_plus.trial.mistakes import advice_for


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        (
            "RuntimeError",
            "one of the variables needed for gradient computation has been modified by an inplace operation",
            "do without in-place operations",
        ),
        ("FailOnRecompileLimitHit", "Hard failure due to fail_on_recompile_limit_hit", "make batches of equal shapes"),
        ("InductorError", "InvalidCxxCompiler: No working C++ compiler found", "install g++"),
        (
            "AttributeError",
            "'list' object has no attribute 'configure_optimizers'",
            "make the optimizer of these; optimizer(self, parameters, model)",
        ),
        ("RuntimeError", "something else", ""),
    ],
)
def test_the_remedy_is_named(kind: str, text: str, remedy: str) -> None:
    found = advice_for(kind, text, {}).remedy
    assert found.startswith(remedy)
    assert bool(found) == bool(remedy)
