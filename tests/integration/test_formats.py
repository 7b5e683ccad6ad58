"""Data of every format trains alike, whatever happens to the workers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Evaluate, Job, Result, Workers
from raytrain_plus.audit.audit import audit
from tests.integration.elastic import Run, raylets
from tests.integration.sources import rows
from tests.support.conversions import write as write_tar
from tests.support.elastic_runs import check_alike_through_a_kill, job_of, many, write
from tests.support.tokenizers import save, texts

pytestmark = pytest.mark.timeout(240)

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Converted data is kept in the user's home.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with raylets(3) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Result:
    return Run(job_of(tmp_path_factory.mktemp("alone"), "arrow", workers=Workers(min=1))).finish()


@pytest.mark.parametrize(
    ("format_", "size"),
    [
        pytest.param("jsonl", 2, marks=SLOW),
        pytest.param("csv", 3, marks=SLOW),
        pytest.param("huggingface", 2, marks=SLOW),
        pytest.param("arrow", 2, marks=SLOW),
        pytest.param("lance", 2, marks=SLOW),
    ],
)
def test_every_format_trains_alike_through_a_kill(tmp_path: Path, alone: Result, format_: str, size: int) -> None:
    check_alike_through_a_kill(job_of(tmp_path, format_, **many(size)), size, alone)


def of_dataset(tmp_path: Path, name: str, shuffle: Literal["none", "rows"] = "rows", **changes: Any) -> Job:
    data = Data(dataset=f"sources:{name}", batch_size=48, shards=8, shuffle=shuffle)
    held_out = Evaluate(dataset="sources:held_out", every_steps=50)
    return job_of(tmp_path, "arrow", **{"data": data, "evaluate": held_out, **changes})


@pytest.fixture(scope="module")
def alone_by_index(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Result:
    return Run(of_dataset(tmp_path_factory.mktemp("by index"), "indexed", workers=Workers(min=1))).finish()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("indexed", 2, marks=SLOW),
        pytest.param("hugging_face", 3, marks=SLOW),
        pytest.param("iterated", 2, marks=SLOW),
        pytest.param("of_ray", 2, marks=SLOW),
    ],
)
def test_every_kind_of_dataset_trains_alike_through_a_kill(
    tmp_path: Path, alone: Result, alone_by_index: Result, name: str, size: int
) -> None:
    expected = alone if name in ("iterated", "of_ray") else alone_by_index
    check_alike_through_a_kill(of_dataset(tmp_path, name, **many(size)), size, expected)


@SLOW
def test_unshuffled_rows_train_alike_by_index_and_from_files(tmp_path: Path, cluster: Cluster) -> None:
    made = [
        Run(job_of(tmp_path / "files", "csv", shuffle="none")).finish(),
        Run(of_dataset(tmp_path / "index", "indexed", shuffle="none")).finish(),
    ]
    assert len({result.state_sha256 for result in made}) == 1


@SLOW
@pytest.mark.parametrize("pack", [None, 16])
def test_tokens_train_alike_through_a_kill(tmp_path: Path, cluster: Cluster, pack: int | None) -> None:
    save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    for name, documents in (("data", texts(1200)), ("held", texts(130))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    settings: dict[str, Any] = {
        "task": "tasks:Texts",
        "data": Data(
            path=str(tmp_path / "data.jsonl"), tokenizer=str(tmp_path / "saved"), pack=pack, batch_size=48, shards=8
        ),
        "evaluate": Evaluate(path=str(tmp_path / "held.jsonl"), every_steps=50),
    }
    alone = Run(job_of(tmp_path / "alone", "arrow", **settings)).finish()
    assert (alone.status, alone.error) == ("finished", None)
    result = check_alike_through_a_kill(job_of(tmp_path / "many", "arrow", **settings, **many(2)), 2, alone)
    described = json.loads((Path(result.path) / "dataset.json").read_text())
    assert ("packed" in str(described)) == (pack is not None)


def write_images(path: Path, format_: str, count: int, seed: int) -> Path:
    """Write small images of three classes, and return what a job names."""
    path.mkdir()
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        encoded = io.BytesIO()
        pixels = rng.integers(0, 200, (12, 10, 3)) + 25 * (number % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(encoded, "PNG")
        made.append((number % 3, f"{number:05d}", encoded.getvalue()))
    if format_ == "images":
        for label, name, content in made:
            (path / str(label)).mkdir(exist_ok=True)
            (path / str(label) / f"{name}.png").write_bytes(content)
        return path
    members = [
        (f"{name}.{suffix}", data)
        for label, name, png in made
        for suffix, data in (("png", png), ("cls", b"%d" % label))
    ]
    write_tar(path / "0.tar", members)
    return path / "0.tar"


@SLOW
@pytest.mark.parametrize("format_", ["images", "webdataset"])
def test_images_train_alike_through_a_kill(tmp_path: Path, cluster: Cluster, format_: str) -> None:
    path = str(write_images(tmp_path / "pictures", format_, 900, 0))
    settings: dict[str, Any] = {
        "task": "tasks:Pictures",
        "data": Data(path=path, image_size=(8, 8), batch_size=48, shards=8),
        "evaluate": Evaluate(path=str(write_images(tmp_path / "others", format_, 90, 1)), every_steps=50),
    }
    alone = Run(job_of(tmp_path / "alone", "arrow", **settings)).finish()
    assert (alone.status, alone.error) == ("finished", None)
    check_alike_through_a_kill(job_of(tmp_path / "many", "arrow", **settings, **many(2)), 2, alone)


@SLOW
@pytest.mark.parametrize("size", [2, 3])
def test_a_mix_trains_alike_on_any_number_of_workers_through_a_kill(
    tmp_path: Path, cluster: Cluster, size: int
) -> None:
    sources = [
        {"path": str(write(tmp_path / "lines", "jsonl", rows(300, 2))), "weight": 2},
        {"path": str(write(tmp_path / "table", "csv", rows(200, 3))), "weight": 1},
        {"dataset": "sources:indexed", "weight": 0.5},
    ]
    data = Data(mix=sources, batch_size=48, shards=8)
    alone = Run(job_of(tmp_path / "alone", "arrow", data=data)).finish()
    result = check_alike_through_a_kill(job_of(tmp_path / "many", "arrow", data=data, **many(size)), size, alone)
    for one in (alone, result):
        found = audit(one.path)
        assert found.clean, found.faults
        assert {epoch.source for epoch in found.epochs} == {0, 1, 2}


@SLOW
def test_a_packed_mix_trains_alike_through_a_kill(tmp_path: Path, cluster: Cluster) -> None:
    save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    for name, first, count in (("web", 0, 1200), ("code", 5000, 400), ("held", 9000, 130)):
        documents = texts(first + count)[first:]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    mix = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("web", 3), ("code", 1))]
    settings: dict[str, Any] = {
        "task": "tasks:Texts",
        "data": Data(mix=mix, tokenizer=str(tmp_path / "saved"), pack=16, batch_size=48, shards=8),
        "evaluate": Evaluate(path=str(tmp_path / "held.jsonl"), every_steps=50),
    }
    alone = Run(job_of(tmp_path / "alone", "arrow", workers=Workers(min=1, max=1), **settings)).finish()
    assert (alone.status, alone.error) == ("finished", None)
    result = check_alike_through_a_kill(job_of(tmp_path / "many", "arrow", **settings, **many(2)), 2, alone)
    described = json.loads((Path(result.path) / "dataset.json").read_text())
    assert [source["packed"]["documents"] for source in described["sources"]] == [1200, 400]
    assert {epoch.source for epoch in audit(result.path).epochs} == {0, 1}
