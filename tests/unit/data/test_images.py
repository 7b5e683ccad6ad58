"""Images are decoded as Pillow does, the same for every reader, and one that cannot be is named."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from raytrain_plus import Data, Evaluate, Job, Task
from raytrain_plus.data.dataset import dataset, training_data
from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.order.sample_order import RowRange
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.values.images import DecodeImages
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import DataError

SIZE = (6, 9)


def picture(number: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (20 + number % 5, 14, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def expected(content: bytes) -> np.ndarray:
    """The image, resized by Pillow: (3, height, width)."""
    image = Image.open(io.BytesIO(content)).convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def job(path: Path, size: tuple[int, int] | None = SIZE, held_out: Path | None = None) -> Job:
    return Job(
        name="images",
        task=Task,
        data=Data(path=str(path), batch_size=4, shards=2, image_size=size),
        epochs=2,
        evaluate=None if held_out is None else Evaluate(path=str(held_out), every_steps=1),
    )


def write_parquet(file: Path, images: list[bytes | None], group: int = 5) -> Source:
    table = pa.table({"image": pa.array(images, pa.binary()), "label": pa.array(range(len(images)))})
    pq.write_table(table, file, row_group_size=group)
    return parquet_source(file)


def test_it_decodes_as_pillow_does() -> None:
    kinds = [
        ("RGB", "PNG"),
        ("L", "PNG"),
        ("P", "GIF"),
        ("RGBA", "PNG"),
        ("CMYK", "JPEG"),
        ("RGB", "WEBP"),
        ("1", "BMP"),
    ]
    contents = [encoded(picture(number, mode), kind) for number, (mode, kind) in enumerate(kinds)]
    table = pa.table({"n": pa.array(range(len(contents))), "photo": pa.array(contents, pa.binary())})
    made = DecodeImages(*SIZE)(table)
    batch = Task().collate(made)
    assert made.column_names == ["n", "photo"]
    assert (batch["photo"].shape, batch["photo"].dtype) == ((len(kinds), 3, *SIZE), torch.uint8)
    assert torch.equal(batch["photo"], torch.from_numpy(np.stack([expected(content) for content in contents])))


def test_the_height_comes_first() -> None:
    wide = Image.new("RGB", (40, 10))
    wide.paste((255, 0, 0), (0, 0, 20, 10))
    made = Task().collate(DecodeImages(2, 8)(pa.table({"image": [encoded(wide)]})))["image"]
    assert made.shape == (1, 3, 2, 8)
    assert made[0, 0, 0].tolist()[:3] == [255, 255, 255]
    assert made[0, 0, 0].tolist()[-3:] == [0, 0, 0]


def test_an_exif_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    picture(1).save(out, "JPEG", exif=exif)
    made = Task().collate(DecodeImages(*SIZE)(pa.table({"image": [out.getvalue()]})))["image"][0]
    assert np.array_equal(made.numpy(), expected(out.getvalue()))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_images_of_hugging_face_and_every_binary_column(kind: pa.DataType) -> None:
    one, two = encoded(picture(1)), encoded(picture(2))
    struct = pa.array([{"bytes": two, "path": "a.png"}], pa.struct([("bytes", kind), ("path", pa.string())]))
    other = pa.array([{"bytes": 1, "path": "a"}])
    made = DecodeImages(*SIZE)(pa.table({"a": pa.array([one], kind), "b": struct, "c": other}))
    batch = Task().collate(made.select(["a", "b"]))
    assert np.array_equal(batch["a"][0].numpy(), expected(one))
    assert np.array_equal(batch["b"][0].numpy(), expected(two))
    assert made.column("c").to_pylist() == other.to_pylist()


def test_no_rows_stay_no_rows() -> None:
    made = DecodeImages(*SIZE)(pa.table({"image": pa.array([], pa.binary())}))
    assert Task().collate(made)["image"].shape == (0, 3, *SIZE)


def test_data_without_images_is_refused() -> None:
    with pytest.raises(DataError, match="no column holds encoded images") as caught:
        DecodeImages(*SIZE)(pa.table({"x": [1], "t": ["a"]}))
    assert caught.value.expected == "a column of binary values, not only x: int64, t: string"


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (None, "column 'image' holds no image: it is null"),
        (b"no image", "column 'image' holds an image that cannot be decoded: it has no header"),
        (encoded(picture(1))[:-200], "column 'image' holds an image that cannot be decoded: image file is truncated"),
    ],
)
def test_a_wrong_image_is_named(tmp_path: Path, bad: bytes | None, what: str) -> None:
    good = encoded(picture(0))
    with pytest.raises(RowFault) as fault:
        DecodeImages(*SIZE)(pa.table({"image": pa.array([good, bad, good], pa.binary())}))
    assert fault.value.row == 1
    assert isinstance(pickle.loads(pickle.dumps(fault.value)), RowFault)
    seen = write_parquet(tmp_path / "a.parquet", [bad if number == 8 else good for number in range(12)])
    for transform in (None, lambda table, rng: table):
        rows = rows_of(job(tmp_path / "a.parquet"), seen, transform)
        for epoch in range(2):
            with pytest.raises(DataError) as caught:
                [rows.read(RowRange(epoch, unit, 0, seen.unit_rows[unit])) for unit in range(3)]
            assert caught.value.what.startswith(what)
            # Row 8 is the fourth of the second row group, wherever the epoch's order puts it.
            assert caught.value.where == f"row 3 of {tmp_path / 'a.parquet'}, row group 1"


def test_a_wrong_image_file_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_plus.data.convert.parts.GROUP_BYTES", 1)
    for number in range(40):
        (tmp_path / "tree" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        # Its header is sound, so that it is converted.
        content = encoded(picture(number))[: -400 if number == 37 else None]
        (tmp_path / "tree" / str(number % 2) / f"{number:02}.png").write_bytes(content)
    seen = dataset(tmp_path / "tree", cache=tmp_path / "cache")
    assert len(seen.unit_rows) == 3
    rows = rows_of(job(tmp_path / "tree"), seen, None)
    with pytest.raises(DataError, match="image file is truncated") as caught:
        [rows.read(RowRange(0, unit, 0, count)) for unit, count in enumerate(seen.unit_rows)]
    assert caught.value.where == str(tmp_path / "tree" / "1" / "37.png")


def test_rows_are_the_same_for_any_cut(tmp_path: Path) -> None:
    seen = write_parquet(tmp_path / "a.parquet", [encoded(picture(number), "JPEG") for number in range(10)], 10)
    rows = rows_of(job(tmp_path / "a.parquet"), seen, None)
    whole = rows.read(RowRange(1, 0, 0, 10))
    pieces = [rows.read(RowRange(1, 0, begin, count)) for begin, count in ((0, 1), (1, 6), (7, 3))]
    assert pa.concat_tables(pieces).equals(whole)
    assert sorted(whole.column(ROW_ID).to_pylist()) == sorted(
        rows_of(job(tmp_path / "a.parquet", None), seen, None).read(RowRange(1, 0, 0, 10)).column(ROW_ID).to_pylist()
    )
    order = rows.sample_order.permutation(1, 0)
    assert order is not None
    assert whole.column("label").to_pylist() == order.tolist()
    images = Task().collate(without_ids(whole))["image"]
    for place, number in enumerate(order.tolist()):
        assert np.array_equal(images[place].numpy(), expected(encoded(picture(number), "JPEG")))


def test_a_transform_gets_decoded_images_and_held_out_rows_are_decoded(tmp_path: Path) -> None:
    seen = write_parquet(tmp_path / "a.parquet", [encoded(picture(number)) for number in range(6)], 6)
    kinds = []

    def noted(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        kinds.append(table.schema.field("image").type)
        return table

    one = job(tmp_path / "a.parquet", held_out=tmp_path / "a.parquet")
    for make in (rows_of, held_out_rows_of):
        table = without_ids(make(one, seen, noted).read(RowRange(0, 0, 0, 6)))
        assert Task().collate(table)["image"].shape == (6, 3, *SIZE)
    assert len(kinds) == 2
    assert all(pa.types.is_fixed_size_list(kind) for kind in kinds)


def test_without_a_size_images_stay_encoded(tmp_path: Path) -> None:
    contents = [encoded(picture(number)) for number in range(4)]
    seen = write_parquet(tmp_path / "a.parquet", contents)
    rows = held_out_rows_of(job(tmp_path / "a.parquet", None), seen, None)
    assert rows.as_read
    assert rows.read(RowRange(0, 0, 0, 4)).column("image").to_pylist() == contents


def test_a_missing_pillow_is_said_before_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", [encoded(picture(1))])
    monkeypatch.setitem(sys.modules, "PIL", None)
    training_data(job(tmp_path / "a.parquet", None), [])
    with pytest.raises(DataError, match="images need the Python package Pillow") as caught:
        training_data(job(tmp_path / "a.parquet"), [])
    assert 'pip install "raytrain-plus[images]"' in caught.value.remedy


def test_16_bits_a_pixel_are_scaled_and_32_are_refused() -> None:
    grey = np.array([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)
    made = DecodeImages(2, 2)(pa.table({"image": pa.array([encoded(Image.fromarray(grey), "PNG")], pa.binary())}))
    assert made.column("image").to_pylist() == [[[[0, 100], [200, 255]]] * 3]
    wide = encoded(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF")
    with pytest.raises(RowFault, match="numbers of 32 bits"):
        DecodeImages(2, 2)(pa.table({"image": pa.array([wide], pa.binary())}))
