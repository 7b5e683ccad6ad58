"""The header of a safetensors file, so that a large one can be written piece by piece, from where the bytes are. Pure.

    8 bytes: length of the header, little-endian | header: JSON, padded with spaces to 8 bytes | the tensors' bytes
(github.com/huggingface/safetensors, "Format"). Any reader of safetensors reads what this begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""torch's names of types, and the format's."""


def header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The header of a file that holds these tensors - name, type in torch's words, shape, bytes - in this order."""
    entries = {}
    at = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
