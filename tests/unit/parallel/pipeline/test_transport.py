"""Values between chunks arrive unchanged; an error about an unsupported value names the layer."""

from __future__ import annotations

import json
import queue
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from raytrain_plus.errors import RunError, TrainingError
from raytrain_plus.parallel.pipeline.message import to_bytes
from raytrain_plus.parallel.pipeline.transport import _KINDS, HEAD_BYTES, TENSORS, Handovers, _Form, _tag, flattened
from tests.unit.parallel.pipeline.replicas import Mail, Threads

CPU = torch.device("cpu")
LEAF = {"type": None, "context": None, "children_spec": []}


@pytest.fixture
def pair() -> tuple[Handovers, Handovers, Mail]:
    mail: Mail = defaultdict(queue.SimpleQueue)
    return Handovers(Threads(0, mail), CPU), Handovers(Threads(1, mail), CPU), mail


def trees() -> list[Any]:
    leaf = torch.randn(4, 2, requires_grad=True)
    return [
        leaf,
        (leaf, torch.arange(4)),
        {"a": [leaf, (leaf * 2, torch.ones(4, dtype=torch.bool))], "b": torch.zeros(0, 3)},
        torch.randn(4, 6, dtype=torch.float64).t(),
        torch.ones(4, dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("number", range(len(trees())))
def test_any_tree_of_tensors_passes(pair: tuple[Handovers, Handovers, Mail], number: int) -> None:
    one, other, _ = pair
    for microbatch in range(3):
        given = flattened(trees()[number], "x")
        one.send(5, microbatch, 4, given, 1, "x")
        # Nothing is known yet of the first one.
        other.expect("forward", 5, microbatch, 4, 0)
        taken, takes_part = other.take(5, microbatch, 4, 0)
        assert taken.tree == given.tree
        assert takes_part == [value.requires_grad for value in given.values]
        for mine, theirs in zip(given.values, taken.values, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.detach(), theirs)
        back = [torch.full_like(value, 7.0) for value in given.values if value.requires_grad]
        inputs = [torch.empty_like(value) for value in back]
        for one_of, gradient in zip(inputs, back, strict=True):
            one_of.grad = gradient
        other.send_gradients(5, microbatch, inputs, 0.1 + microbatch, 0)
        returned = one.take_gradients(5, microbatch, 4, 1)
        assert returned.weight == 0.1 + microbatch
        assert all(map(torch.equal, returned.gradients, back))
    one.finish()


def test_shapes_are_a_function_of_the_rows_alone(pair: tuple[Handovers, Handovers, Mail]) -> None:
    one, other, mail = pair
    for microbatch, rows in enumerate((4, 4, 3, 4, 3)):
        one.send(0, microbatch, rows, flattened(torch.ones(rows, 2), "x"), 1, "x")
        taken, _ = other.take(0, microbatch, rows, 0)
        assert taken.values[0].shape == (rows, 2)
    # Five tensors and two descriptions.
    assert len(mail) == 5 + 2
    with pytest.raises(TrainingError, match=r"the layer 'x' returns float32 \[4, 3\] without a gradient for one"):
        one.send(0, 9, 4, flattened(torch.ones(4, 3), "x"), 1, "the layer 'x'")


def test_batches_pass_to_another_stage_and_to_the_same_one(pair: tuple[Handovers, Handovers, Mail]) -> None:
    one, other, mail = pair
    batch = {"x": torch.ones(2), "words": ["a", "b"]}
    one.send_note("batch", 3, batch, 1)
    taken = other.take_note("batch", 3, 0)
    assert torch.equal(taken["x"], batch["x"])
    assert taken["words"] == batch["words"]
    before = len(mail)
    one.send_note("batch", 4, batch, 0)
    assert one.take_note("batch", 4, 0)["words"] == batch["words"]
    assert len(mail) == before


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 100, HEAD_BYTES, 10 * HEAD_BYTES])
def test_notes_of_any_length_pass_expected_or_not(pair: tuple[Handovers, Handovers, Mail], length: int) -> None:
    one, other, mail = pair
    for number in range(2):
        if number:
            other.expect_note("header", number, 0)
        one.send_note("header", number, bytes(length), 1)
        assert other.take_note("header", number, 0) == bytes(length)
    assert len(mail) == (2 if length < HEAD_BYTES - 50 else 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.ones(1), 3), "the layer 'x' returns int; pipeline stages can exchange only"),
        ({}, "the layer 'x' returns nothing"),
        ([torch.ones(1)] * (TENSORS + 1), f"the layer 'x' returns {TENSORS + 1} tensors"),
    ],
)
def test_values_that_cannot_pass_are_rejected(value: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        flattened(value, "the layer 'x'")


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


@pytest.mark.parametrize(
    "tree",
    [
        OrderedDict(b=torch.ones(1), a=[torch.ones(2)]),
        Pair(torch.ones(1), torch.ones(2)),
        defaultdict(list, a=torch.ones(1)),
        torch.ones(3, 2).max(dim=0),
        {1: torch.ones(1), (2, "a"): torch.ones(1)},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_all_tree_types_of_torch_pass(pair: tuple[Handovers, Handovers, Mail], tree: Any) -> None:
    one, other, _ = pair
    one.send(0, 0, 2, flattened(tree, "x"), 1, "x")
    taken, _ = other.take(0, 0, 2, 0)
    assert taken.tree == flattened(tree, "x").tree
    assert type(taken.whole()) is type(tree)


def test_reading_a_description_imports_nothing(pair: tuple[Handovers, Handovers, Mail], tmp_path: Path) -> None:
    # Torch's own encoding of a tree names modules, which torch imports when it reads the tree.
    (tmp_path / "canary_module.py").write_text("import pathlib; pathlib.Path(__file__).with_name('canary').touch()")
    sys.path.insert(0, str(tmp_path))
    try:
        factory = {"default_factory_module": "canary_module", "default_factory_name": "x", "dict_context": ["a"]}
        node = {"type": "collections.defaultdict", "context": factory, "children_spec": [LEAF]}
        torchs = json.dumps([1, node])
        with pytest.raises(AttributeError):
            pytree.treespec_loads(torchs)
        assert (tmp_path / "canary").exists(), "the attack works on torch's reader"
        (tmp_path / "canary").unlink()
        sys.modules.pop("canary_module")
        for tree in (torchs, ("canary_module.x", None, [None]), ("collections.defaultdict", factory, [None]), 3):
            message = to_bytes([[("float32", (1,), False)], tree])
            with pytest.raises((RunError, ValueError)):
                _Form.from_bytes(memoryview(message)).tree.unflatten([torch.ones(1)])
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "canary").exists()


def test_no_two_messages_of_a_step_have_the_same_tag() -> None:
    tags = [
        _tag(kind, boundary, microbatch, part)
        for kind in _KINDS
        for boundary in (0, 1, 63)
        for microbatch in (0, 1, 65535)
        for part in (0, 1, TENSORS + 1)
    ]
    assert len(set(tags)) == len(tags)
    assert max(tags) < 2**31
