"""Changed data is found, and is not confused with data that always was different."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import dataset
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.packing import packed
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.tokenized_source import tokenized
from raytrain_plus.errors import DataChanged, DataError
from raytrain_plus.workers.preparation.data_check import same_data, sights_of
from tests.support.datasets import write
from tests.support.tokenizers import save, texts
from tests.unit.workers.members import plan_of


def test_a_worker_compares_the_data_with_an_earlier_workers_view_of_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    # The driver's node wrote its own, at another time.
    driver, here, file = plan.data, str(tmp_path / "data"), tmp_path / "data" / "a.parquet"
    os.utime(file, (1, 1))
    first = same_data(plan, [], driver)
    assert first.sights != driver.sights
    later = replace(plan, sights={here: first.sights})
    assert same_data(later, [], driver).sights == first.sights
    assert sights_of(replace(plan, data=first, held_out=None)) == later.sights
    os.utime(file, (2, 2))
    with pytest.raises(DataChanged, match=r"its modification time changed: 1970-01-01 00:00:01\.000000 UTC -> 1970"):
        same_data(later, [], driver)
    # It is reported as a change, whatever else is wrong with it.
    file.write_bytes(b"no Parquet")
    with pytest.raises(DataChanged, match="its size changed"):
        same_data(later, [], driver)


def test_other_data_than_the_drivers_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    write(tmp_path / "data" / "a.parquet", 9)
    with pytest.raises(DataError, match="sees different data than the driver") as caught:
        same_data(plan, [], plan.data)
    assert parquet_source(tmp_path / "data").fingerprint[:12] in str(caught.value)


def test_another_tokenizer_than_the_drivers_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    save(tmp_path / "saved")
    driver = tokenized(plan.data, tmp_path / "saved")
    assert same_data(plan, [], driver) == driver
    save(tmp_path / "saved", change=1)
    with pytest.raises(DataError, match=r"this node \(.*\) has a different tokenizer than the driver"):
        same_data(plan, [], driver)
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"data.tokenizer: .*there is no such file"):
        same_data(plan, [], driver)


def test_packed_rows_are_compared_by_their_documents_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, file, config = plan_of(tmp_path), tmp_path / "texts.parquet", tmp_path / "saved" / "tokenizer_config.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "saved")
    pq.write_table(pa.table({"text": texts(100)}), file)
    driver = packed(dataset(file), 8, tmp_path / "saved")
    first = same_data(plan, [], driver)
    assert (first.fingerprint, first.packing, first.documents) == (driver.fingerprint, driver.packing, driver.documents)
    # Of the packed files, and not of the file that the user names.
    assert sights_of(replace(plan, data=first, held_out=None)) == {}
    os.utime(file, (1, 1))
    assert same_data(plan, [], driver).source.named != first.source.named
    twice = mixed([driver, driver])
    assert same_data(plan, [], twice).fingerprint == twice.fingerprint
    config.write_text('{"eos_token": "[PAD]"}')
    with pytest.raises(DataError, match="names another token that ends a document") as caught:
        same_data(plan, [], driver)
    assert caught.value.where == str(file)
    config.unlink()
    save(tmp_path / "saved", change=1)
    with pytest.raises(DataError, match=r"data\.tokenizer has another content"):
        same_data(plan, [], driver)
    pq.write_table(pa.table({"text": texts(99)}), file)
    with pytest.raises(DataError, match=r"sees different data than the driver: texts.parquet has"):
        same_data(plan, [], driver)
