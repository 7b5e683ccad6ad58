"""Messages between stages: every part of a batch arrives unchanged, and no message can run code."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import pickle
import random
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch

from raytrain_plus.errors import RunError, TaskError
from raytrain_plus.parallel.pipeline.message import KNOWN, classes_of, from_bytes, to_bytes
from raytrain_plus.torch_compat import pytree
from raytrain_plus.training.exchange.header import Flags


class Point(NamedTuple):
    x: torch.Tensor
    label: str


class Color(enum.Enum):
    RED = "red"


@dataclass
class Plain:
    x: torch.Tensor
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding: a mapping with its own state, which moves itself."""

    def __init__(self, data: dict[str, Any], sequences: int = 1) -> None:
        super().__init__(data)
        self._sequences = sequences

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "sequences": self._sequences}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self._sequences = state["data"], state["sequences"]

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()}, self._sequences)


class Image(torch.Tensor):
    """Like torchvision's tensors: a tensor with attributes."""


class Slots:
    __slots__ = ("a", "b")


@dataclass
class Listed(list[int]):
    """A dataclass that holds more than its attributes."""


@dataclass
class WithSlots(Slots):
    """A dataclass whose base keeps attributes elsewhere."""

    c: int


class Tokens:
    """Like tokenizers' Encoding, a part of its BatchEncoding: it gives its state as bytes."""

    def __init__(self, state: bytes = b"") -> None:
        self.held = state

    def __getstate__(self) -> bytes:
        return self.held

    def __setstate__(self, state: bytes) -> None:
        if not state.isascii():
            raise Exception("as that library raises it")
        self.held = state


class Text(str):
    """Text of a class of its own."""


class Registered:
    """A container that its library has registered with torch's pytree."""

    def __init__(self, parts: list[Any], how: Any) -> None:
        self.parts, self.how = parts, how


pytree.register_pytree_node(
    Registered, lambda value: (value.parts, value.how), lambda parts, how: Registered(list(parts), how)
)


class Named(dict[str, Any]):
    """A dict with attributes."""


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def passed(value: Any) -> Any:
    return from_bytes(to_bytes(value, classes_of(value)), classes_of(value))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are alike in everything that a task can see."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
        bits = [tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(bits[0]) == bytes_of(bits[1])
    if isinstance(one, np.ndarray):
        assert one.flags.fnc == other.flags.fnc
        assert other.flags.writeable
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    if isinstance(one, (Plain, Encoding, Registered, Tokens)):
        return same(vars(one), vars(other))
    if isinstance(one, Frozen):
        return all(same(getattr(one, name), getattr(other, name)) for name in Frozen.__slots__)
    return bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_shape_and_layout_pass(dtype: torch.dtype) -> None:
    base = torch.arange(4 * 6 * 3).remainder(120).to(dtype).reshape(4, 6, 3)
    tensors = [
        base,
        base[0, 0, 0],
        base[:0],
        base.transpose(0, 2),
        base[:, ::2],
        base[:, 0, :1].expand(4, 5),
        torch.zeros(1).expand(4),
        base[1:, 3:],
        torch.zeros(2, 4, 3, 5).to(dtype).to(memory_format=torch.channels_last),
    ]
    for tensor in tensors:
        found = passed(tensor)
        assert same(tensor, found), tensor
        assert not found.numel() or found.data_ptr() != tensor.data_ptr()


def test_special_floats_keep_their_bits() -> None:
    for tensor in (torch.tensor([math.nan, -0.0, math.inf]), torch.tensor([1 + 2j]).conj(), torch.zeros(2)._neg_view()):
        assert (
            torch.equal(torch.view_as_real(passed(tensor)), torch.view_as_real(tensor.resolve_conj()))
            if (tensor.is_complex())
            else bytes_of(passed(tensor)) == bytes_of(tensor.resolve_neg())
        )


def slots() -> Slots:
    made = Slots()
    made.a = 1
    made.b = "b"
    return made


def named() -> Named:
    made = Named(a=1)
    made.extra = "extra"  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "value",
    [
        None,
        [
            True,
            False,
            0,
            -1,
            2**64 - 1,
            2**64,
            -(2**63),
            -(2**63) - 1,
            2**20000,
            2**70,
            0.1,
            -0.0,
            math.nan,
            math.inf,
            -math.inf,
            "",
            "\ud800",
            "ä\n\0",
            1 + 2j,
            complex(-0.0, math.inf),
        ],
        {"a": 1, "~": 2, "b": {1: "int", (1, "x"): "tuple", None: None, False: 3}},
        ([], (), {}, set(), frozenset(), {1, "a"}, frozenset({2})),
        b"bytes",
        bytearray(b"\0\1"),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.asfortranarray(np.ones((3, 4), np.float16)),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(0, np.int32),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.float32(0.1),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2020-01-01", "ns"),
        np.array([(1, [2.0, 3.0])], dtype=[("a", ">i4"), ("b", "f8", (2,))])[0],
        np.array(3.0),
        Point(torch.ones(2), "a"),
        Plain(torch.ones(2), Plain(torch.zeros(1))),
        Frozen(torch.ones(2)),
        Encoding({"ids": torch.ones(2, 3, dtype=torch.int64)}, 2),
        Encoding({"ids": Tokens(b"ascii")}),
        Registered([torch.ones(2), Plain(torch.ones(1))], {"how": (1, None)}),
        torch.ones(3, 2).max(dim=0),
        named(),
        OrderedDict(b=1, a=2),
        Counter("hello"),
        defaultdict(list, a=[1]),
        defaultdict(None, a=1),
        deque([1, 2], maxlen=3),
        torch.Size([1, 2]),
        Flags(pause=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_parts_of_batches_pass(value: Any) -> None:
    assert same(passed({"inside": [value]}), {"inside": [value]})


def test_the_state_of_objects_passes() -> None:
    assert passed(named()).extra == "extra"
    assert passed(defaultdict(list))["new"] == []
    derived = WithSlots(3)
    derived.a = 1
    found = passed(derived)
    assert (found.a, found.c, hasattr(found, "b")) == (1, 3, False)
    assert passed(torch.ones(2, requires_grad=True)).requires_grad


def test_a_tokenizers_batch_and_a_models_output_pass() -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "-": 2}, unk_token="-"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    batch = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="-")(
        ["a b", "a"], padding=True, return_tensors="pt"
    )
    found = passed(batch)
    assert type(found) is type(batch)
    assert found["input_ids"].tolist() == [[0, 1], [0, 2]]
    assert [found.word_ids(row) for row in (0, 1)] == [batch.word_ids(row) for row in (0, 1)]
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.ones(2))
    assert type(passed(output)) is type(output)
    assert [*passed(output)] == ["logits"]
    assert passed(output).loss is None


def test_one_tensor_in_two_places_stays_one() -> None:
    ids = torch.arange(3)
    found = passed({"ids": ids, "labels": ids, "other": ids.clone()})
    assert found["ids"] is found["labels"]
    assert found["ids"] is not found["other"]


def test_each_tensor_has_its_own_memory_with_the_same_alignment() -> None:
    for tensor in passed([torch.ones(3), torch.ones(5, dtype=torch.uint8), torch.ones(7)]):
        assert tensor.data_ptr() % 64 == 0
        tensor.add_(1)


def test_unsupported_values_are_named_with_a_remedy() -> None:
    for value, words in (
        (lambda: 0, r"batch\['x'\]\[1\] is a builtins.function, which cannot pass"),
        (open, r"batch\['x'\]\[1\] is a builtins.builtin_function_or_method"),
        (Plain, r"batch\['x'\]\[1\] is a builtins.type"),
        (torch.eye(2).to_sparse(), r"a tensor with the layout torch.sparse_coo"),
        (np.array([{}], dtype=object), "a NumPy array of Python objects"),
        (iter([]), r"batch\['x'\]\[1\] is a builtins.list_iterator"),
        (Plain(torch.ones(1), sys), r"batch\['x'\]\[1\] \(Plain\)\['extra'\] is a builtins.module"),
    ):
        with pytest.raises(TaskError, match=words) as caught:
            classes_of({"x": [0, value]})
        assert "Task.collate" in caught.value.remedy
    for value, words in (
        (Plain(torch.ones(1), [open]), r"batch \(Plain\)\['extra'\]\[0\] is"),
        (Point(torch.ones(1), open), r"batch\.label is"),  # type: ignore[arg-type]
        ({"a": {open}}, r"batch\['a'\] \(set\) is"),
        (Registered([open], None), r"batch \(Registered\) is"),
        ({datetime.date(2020, 1, 2): 1}, r"batch \(keys of dict\)\[0\] is a datetime.date"),
        (defaultdict(slots), r"batch \(keys of defaultdict\)\[0\] is a builtins.function"),
    ):
        with pytest.raises(TaskError, match=words):
            classes_of(value)
    deep: Any = 1
    for _ in range(100):
        deep = (deep,)
    assert passed(deep) == deep
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TaskError, match="more than 100 levels deep"):
        classes_of(endless)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (decimal.Decimal("0.1"), "a decimal.Decimal"),
        (datetime.date(2020, 1, 2), "a datetime.date"),
        (datetime.datetime(2020, 1, 2), "a datetime.datetime"),
        (datetime.time(1), "a datetime.time"),
        (datetime.timedelta(1), "a datetime.timedelta"),
        (Color.RED, r"a .*\.Color"),
        (slots(), r"a .*\.Slots"),
        (Text("a"), r"a .*\.Text"),
        (range(3), "a builtins.range"),
        (Listed(), r"a .*\.Listed"),
        (decimal.Decimal, "a builtins.type"),
        (MappingProxyType({"a": 1}), "a builtins.mappingproxy"),
        (torch.ones(2, 2).as_subclass(Image), r"a .*\.Image"),
        (torch.nn.Parameter(torch.ones(1)), "a torch.nn.parameter.Parameter"),
        (np.ma.masked_array([1, 2], [True, False]), "a numpy.ma.*MaskedArray"),
        (np.zeros(3, "V0"), r"a NumPy array of the type \|V0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_neither_a_container_nor_plain_is_refused_by_name(value: Any, found: str) -> None:
    with pytest.raises(TaskError, match=rf"batch\['when'\] is {found}, which cannot pass between pipeline stages"):
        classes_of({"when": value})
    with pytest.raises(TaskError, match=rf"batches\[0\]\['when'\] is {found}, which cannot pass"):
        to_bytes([{"when": value}], KNOWN, "batches")


def test_a_class_missing_from_the_first_microbatch_is_rejected_on_both_sides() -> None:
    with pytest.raises(
        TaskError, match=r"batch\[0\] is a .*\.Plain, a class that the first microbatch does not contain"
    ):
        to_bytes([Plain(torch.ones(1))], KNOWN, "batch")
    message = to_bytes(Plain(torch.ones(1)), classes_of(Plain(torch.ones(1))))
    with pytest.raises(RunError, match=r"cannot be read: KeyError: .*Plain"):
        from_bytes(message)


def test_reading_a_message_imports_calls_and_unpickles_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return (open, (str(canary), "w"))

    pickled = pickle.dumps(Canary())
    names = ("builtins.open", "_io.open", "os.system", "subprocess.Popen", "builtins.eval", "pathlib.Path")
    deep: Any = 1
    for _ in range(500):
        deep = list_of(deep)
    forged = [
        pickled,
        len(pickled).to_bytes(8, "little") + pickled,
        block(["array", "'|O'", [1], "C", False], pickled),
        block(["array", f"__import__('pathlib').Path({str(canary)!r}).touch()", [1], "C", False], bytes(8)),
        *(
            written([[name, context, parts], []])
            for name in names
            for context in (None, list_of())
            for parts in ([str(canary), "w"], [["builtins.dict", list_of(), []]])
        ),
        *(
            written([["collections.defaultdict", list_of([name], list_of()), []], []])
            for name in (*names, "tests.Plain")
        ),
        *(written([[name, None, [str(canary)]], []]) for name in ("builtins.str", "builtins.int", "builtins.bytes")),
        written([["builtins.type", None, ["eval"]], []]),
        written([["builtins.eval"], []]),
        written([["antigravity", None, []], []]),
        written([deep, []]),
        written([msgpack.ExtType(7, b"x"), []]),
        written([msgpack.ExtType(1, b"x"), []]),
        block(["tensor", "load", [0], [1], False]),
        block(["tensor", "float32", [1 << 40], [1], False], bytes(8)),
        block(["tensor", "float32", [2], [1 << 62], False], bytes(8)),
        block(["tensor", "float32", [-1, -2], [1, 1], False], bytes(8)),
        # Elements without bytes: any number of them would match the length.
        block(["array", "'|V0'", [1 << 40], "C", False]),
        block(["array", "'<f4'", [1 << 40], "C", False], bytes(8)),
        block(["array", "'<f4'", [-1, -2], "C", False], bytes(8)),
        written([[0], [[-8, "bytes"]]], bytes(8)),
        written([[0], [[1 << 40, "bytes"]]], bytes(8)),
        written([[3], []]),
        (5).to_bytes(8, "little") + b"\xdd\xff\xff\xff\xff",
        (1 << 60).to_bytes(8, "little"),
        b"",
    ]
    for message in forged:
        with pytest.raises(RunError, match="a message from another stage cannot be read"):
            from_bytes(bytearray(message))
    assert not canary.exists()


def list_of(*nodes: Any) -> list[Any]:
    return ["builtins.list", None, [*nodes]]


def block(content: list[Any], data: bytes = b"") -> bytes:
    """Return a message of one block."""
    return written([[0], [[len(data), *content]]], data)


def written(header: Any, blocks: bytes = b"") -> bytes:
    packed = msgpack.packb(header)
    return (len(packed).to_bytes(8, "little") + packed).ljust(-(-(8 + len(packed)) // 64) * 64, b"\0") + blocks


def test_forged_messages_differ_from_good_ones_only_in_what_they_forge() -> None:
    assert from_bytes(bytearray(block(["array", "'<f4'", [2], "C", False], bytes(8)))).tolist() == [0, 0]
    assert from_bytes(bytearray(block(["tensor", "float32", [2], [1], False], bytes(8)))).tolist() == [0, 0]
    assert from_bytes(bytearray(block(["bytes"], b"ab"))) == b"ab"
    made = written([["collections.defaultdict", list_of(["builtins.int"], list_of("a")), [1]], []])
    assert from_bytes(bytearray(made)) == defaultdict(int, a=1)


def test_damaged_messages_only_raise_run_error() -> None:
    draw = random.Random(0)
    value = [
        {"x": torch.ones(3), "y": np.ones(2), "z": [1, (2, "a"), b"c", OrderedDict(a=1)]},
        [
            Plain(torch.ones(2)),
            Frozen(torch.ones(1)),
            named(),
            Encoding({"ids": Tokens(b"ascii")}),
            Point(torch.ones(1), "a"),
        ],
        (Registered([1], "how"), defaultdict(list, a=1), deque([1], 2), {2**70, 1j}, torch.Size([1])),
    ]
    classes = classes_of(value)
    whole = bytes(to_bytes(value, classes))
    for _ in range(3000):
        message = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            message[draw.randrange(len(message))] = draw.randrange(256)
        try:
            from_bytes(message[: draw.randrange(len(message))] if draw.random() < 0.2 else message, classes)
        except RunError:
            continue
