"""Decode the images of rows to tensors of one size: the setting `data.image_size`."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raytrain_plus.data.values.columns import column_of
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import DataError, first_line


@dataclass(frozen=True, slots=True)
class DecodeImages:
    """Decode every column of images to RGB, resized to `height` and `width` pixels; a `transform_block.RowByRow`.

    Columns of images are those of encoded bytes, and the structs of `bytes` and `path` that Hugging Face's `datasets`
    writes. They become fixed-size lists of uint8, which collate to (rows, 3, height, width). Pixels are interpolated
    bilinearly, of an animation the first frame is used, transparency is dropped and an EXIF orientation is not applied.
    """

    height: int
    width: int

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the rows with decoded images.

        Raises `RowFault` for an image that is null or cannot be decoded, and `DataError` if no column holds images or
        Pillow is missing.
        """
        names = [field.name for field in rows.schema if _is_bytes(field.type) or _is_struct(field.type)]
        if not names:
            columns = ", ".join(f"{field.name}: {field.type}" for field in rows.schema)
            raise DataError(
                "no column holds encoded images",
                where="data.image_size",
                expected=f"a column of binary values, not only {columns}",
                remedy="leave data.image_size out",
            )
        for name in names:
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, name, _as_lists(self._decoded(rows.column(at), name)))
        return rows

    def _decoded(self, column: pa.ChunkedArray, name: str) -> npt.NDArray[np.uint8]:
        """Return the images of a column: (rows, 3, height, width)."""
        pillow = load_pillow()
        images = np.empty((len(column), 3, self.height, self.width), dtype=np.uint8)
        for row, value in enumerate(pc.struct_field(column, "bytes") if _is_struct(column.type) else column):
            encoded = value.as_buffer()
            if encoded is None:
                raise RowFault(row, f"column '{name}' holds no image: it is null", "remove the row")
            try:
                with pillow.open(io.BytesIO(encoded)) as opened:
                    # To convert one that is RGB would copy it.
                    whole = opened if opened.mode == "RGB" else _in_colour(pillow, opened)
                    image = whole.resize((self.width, self.height), pillow.Resampling.BILINEAR)
            except Exception as error:
                # Pillow raises errors of many types for damaged files.
                what = f"column '{name}' holds an image that cannot be decoded: {_why(pillow, error)}"
                raise RowFault(row, what, f"replace the image, or remove the row; or column '{name}'") from error
            images[row] = np.asarray(image).transpose(2, 0, 1)
        return images


def load_pillow() -> Any:
    """Return the module `PIL.Image`. Raises `DataError` if Pillow is not installed."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise DataError(
            "images need the Python package Pillow, which is not installed",
            where=sys.executable,
            remedy='run `pip install "raytrain-plus[images]"` on every machine',
        ) from None
    return Image


def header_fault(encoded: bytes) -> str:
    """Return why Pillow cannot read the header of an image; empty if it can. Raises `DataError` without Pillow."""
    if not encoded:
        return "it is empty"
    pillow = load_pillow()
    try:
        pillow.open(io.BytesIO(encoded)).close()
    except Exception as error:
        # Pillow raises errors of many types for damaged files.
        return _why(pillow, error)
    return ""


def _in_colour(pillow: Any, image: Any) -> Any:
    """Return an image as RGB. Raises `ValueError` for pixels that have no range of their own."""
    if image.mode.startswith("I;16"):
        # Pillow would cut off what is above 255.
        image = pillow.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels are numbers of 32 bits (mode {image.mode}): decode it in data.transform")
    return image.convert("RGB")


def _why(pillow: Any, error: Exception) -> str:
    """Return in words why Pillow cannot read an image."""
    # Its own words hold the address of an object.
    unknown = isinstance(error, pillow.UnidentifiedImageError)
    return "it has no header that Pillow knows" if unknown else first_line(error)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_struct(kind: pa.DataType) -> bool:
    """Return whether a type is that of an image of Hugging Face's `datasets`."""
    if not pa.types.is_struct(kind) or {field.name for field in kind.fields} != {"bytes", "path"}:
        return False
    return _is_bytes(kind.field("bytes").type)


def _as_lists(images: npt.NDArray[np.uint8]) -> pa.Array:
    column = column_of(images.reshape(-1))
    for length in reversed(images.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column
