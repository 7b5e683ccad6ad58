"""A fitting partition is found if one exists; otherwise the message names what does not fit."""

import doctest

from raytrain_plus.parallel.pipeline import memory as module
from raytrain_plus.parallel.pipeline.memory import Misfit, partition_within_memory
from raytrain_plus.parallel.pipeline.partition import Layer


def test_the_docstring_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_slower_partition_is_used_if_the_fastest_does_not_fit() -> None:
    layers = [Layer("a", 3.0, 1), Layer("b", 1.0, 8), Layer("c", 1.0, 8), Layer("d", 1.0, 1)]
    assert partition_within_memory(layers, "1f1b", 2, 2, room=100) == ((("a",),), (("b", "c", "d"),))
    assert partition_within_memory(layers, "1f1b", 2, 2, room=10) == ((("a", "b"),), (("c", "d"),))
    found = partition_within_memory(layers, "1f1b", 2, 2, room=8)
    assert isinstance(found, Misfit)
    assert (found.stage, found.bytes, found.layer) == (1, 17, "b")


def test_a_fit_is_found_if_one_of_two_chunks_needs_more_than_half() -> None:
    layers = [Layer(name, 1.0, size) for name, size in zip("abcd", (6, 1, 1, 1), strict=True)]
    assert partition_within_memory(layers, "zero-bubble", 2, 4, room=10) == ((("a",), ("d",)), (("b",), ("c",)))
    assert partition_within_memory(layers, "interleaved", 1, 4, room=9) == ((("a", "b"), ("c", "d")),)


def test_activations_count_as_often_as_the_schedule_holds_them() -> None:
    layers = [Layer(name, 1.0, 10, activations=5) for name in "ab"]
    assert not isinstance(partition_within_memory(layers, "1f1b", 2, 8, room=20), Misfit)
    assert isinstance(partition_within_memory(layers, "gpipe", 2, 8, room=20), Misfit)
    assert not isinstance(partition_within_memory(layers, "gpipe", 2, 8, room=50), Misfit)
    assert not isinstance(partition_within_memory(layers, "gpipe", 1, 8, room=30), Misfit)


def test_memory_does_not_change_a_partition_that_changes_results() -> None:
    layers = [Layer("a", 1.0, 4, cost=3), Layer("b", 3.0, 8, cost=1), Layer("c", 1.0, 8, cost=1), Layer("d", 1.0, 4)]
    assert partition_within_memory(layers, "1f1b", 2, 2, room=14) == ((("a", "b"),), (("c", "d"),))
    for room in (25, 100):
        assert partition_within_memory(layers, "pipedream", 2, 2, room) == ((("a",),), (("b", "c", "d"),))
    found = partition_within_memory(layers, "pipedream", 2, 2, room=24)
    assert isinstance(found, Misfit)
    assert (found.stage, found.bytes, found.layer) == (1, 25, "b")


def test_memory_does_not_change_a_given_partition() -> None:
    layers = [Layer(name, 1.0, 4) for name in "abcd"]
    given = ("a", "b", "c", "d")
    assert partition_within_memory(layers, "zero-bubble", 2, 4, 8, given) == ((("a",), ("d",)), (("b",), ("c",)))
    assert partition_within_memory(layers, "1f1b", 2, 2, 12, ("a", "d")) == ((("a", "b", "c"),), (("d",),))
    assert isinstance(partition_within_memory(layers, "1f1b", 2, 2, 8, ("a", "d")), Misfit)
    assert partition_within_memory(layers, "1f1b", 2, 2, 8) == ((("a", "b"),), (("c", "d"),))
