"""Build the header of a safetensors file, so that a large file can be written piece by piece without copies. Pure.

    8 bytes: length of the header, little-endian | header: JSON, padded with spaces to 8 bytes | the tensors' bytes
(github.com/huggingface/safetensors, "Format"). Any safetensors reader can read the resulting files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from raytrain_plus.state.dtypes import DTYPES


def header(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file that holds these tensors, in this order: (name, torch dtype name, shape, bytes)."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": DTYPES[dtype].word, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
