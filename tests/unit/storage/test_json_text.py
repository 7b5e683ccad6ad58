"""`json_text` writes strict JSON."""

import doctest
import json
import math

import raytrain_plus.storage.json_text as module
from raytrain_plus.storage.json_text import json_text


def test_numbers_that_are_not_finite_become_text() -> None:
    text = json_text({"a": [math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": 1.5, "e": None})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read == {"a": ["nan", ["inf"]], "b": {"c": "-inf"}, "d": 1.5, "e": None}
    assert float(read["b"]["c"]) == -math.inf


def test_the_example() -> None:
    assert doctest.testmod(module).failed == 0
