"""The dtypes of tensors that a checkpoint can hold. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A dtype."""

    word: str
    """Its name in safetensors."""
    bytes: int
    """Bytes of one element."""


DTYPES = {
    "float64": Dtype("F64", 8),
    "float32": Dtype("F32", 4),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "int64": Dtype("I64", 8),
    "int32": Dtype("I32", 4),
    "int16": Dtype("I16", 2),
    "int8": Dtype("I8", 1),
    "uint64": Dtype("U64", 8),
    "uint32": Dtype("U32", 4),
    "uint16": Dtype("U16", 2),
    "uint8": Dtype("U8", 1),
    "bool": Dtype("BOOL", 1),
    "complex64": Dtype("C64", 8),
}
"""The dtypes by their torch names."""
