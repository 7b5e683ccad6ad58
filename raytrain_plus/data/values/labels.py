"""The names of the classes that Hugging Face's `datasets` writes beside a column of their numbers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Labels = Mapping[str, Sequence[str]]
"""Column -> its classes, in the order of their numbers."""

_KEY = b"huggingface"


def labels_in(metadata: Mapping[bytes, bytes]) -> Labels:
    """Return the classes that the metadata of an Arrow schema names; none if it was not written by `datasets`."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return labels_of(json.loads(metadata[_KEY])["info"]["features"])
    return {}


def labels_of(features: Mapping[str, Any]) -> Labels:
    """Return the classes among the features of a dataset."""
    return {
        name: list(feature["names"])
        for name, feature in features.items()
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"
    }
