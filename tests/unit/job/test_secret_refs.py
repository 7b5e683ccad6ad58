"""Secrets that a job refers to by environment variable."""

from __future__ import annotations

import pytest

from raytrain_plus import InputError
from raytrain_plus.job.secret_refs import resolved


def test_a_variable_that_is_not_set_is_named_with_its_place() -> None:
    with pytest.raises(InputError, match=r"args\.hub\[1\]\.token: the environment variable TOKEN is not set"):
        resolved({"hub": [1, {"token": "${env:TOKEN}"}]}, {})


def test_everything_else_stays() -> None:
    args = {"a": "$TOKEN", "b": "${TOKEN}", "c": (1, None, 2.5), "d": True}
    assert resolved(args, {"TOKEN": "x"}) == args
