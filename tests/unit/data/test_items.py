"""A dataset is read by index in the sample order, alike for every reader, and changes are noticed."""

from __future__ import annotations

import doctest
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain_plus.data.dataset import returned_dataset
from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.order import length_groups
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.sources import items as items_module
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.items import BLOCK, ItemSource, changes_of
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.row_names import named_rows
from raytrain_plus.data.sources.source import Source, check_enough, facts_of
from raytrain_plus.data.sources.tokenized_source import TokenizedSource
from raytrain_plus.data.sources.user_dataset import UserDataset, open_dataset
from raytrain_plus.data.values.tokens import TokenizerFile
from raytrain_plus.errors import DataChanged, DataError, TaskError
from tests.support.datasets import seen_again

SOURCE = """
from pathlib import Path
import torch

class Squares(torch.utils.data.Dataset):
    def __init__(self, length, shift=0):
        self.length, self.shift, self.asked = length, shift, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        if index == getattr(self, "broken", None):
            raise ValueError("no such image")
        return torch.tensor([index, index**2]) + self.shift, index

class Many(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in indices][: getattr(self, "most", None)]

class Random(Squares):
    def __getitem__(self, index):
        return torch.rand(2), index

class Words(Squares):
    def __getitem__(self, index):
        self.asked.append(index)
        return {"ids": [1] * (1 + index * 7919 % 97 + self.shift), "number": index, "x": 0.5}

class Unsized:
    def __getitem__(self, index):
        return index

def thousand(): return Squares(1000)
def shifted(): return Squares(1000, 1)
def fewer(): return Squares(999)
def many(): return Many(1000)
def random(): return Random(1000)
def empty(): return Squares(0)
def unsized(): return Unsized()
def splits(): return {"train": 1, "test": 2}
def nothing(): return None
def raises(): raise RuntimeError("no network")
def stored(): return torch.load(Path(__file__).with_name("rows.pt")).tolist()
def half(number): return torch.utils.data.random_split(Squares(1000), [600, 400])[number]
def first_half(): return half(0)
def second_half(): return half(1)
def loader(): return torch.utils.data.DataLoader(Squares(1000))
def reserved(): return [{"_raytrain_id": 1}]
def half_precise(): return [torch.zeros(2, dtype=torch.bfloat16)] * 70
def pointers(): return [__import__("numpy").array([object()])] * 70
def words(): return Words(600)
def longer(): return Words(600, 1)
def listed(): return [{"x": number} for number in range(40)]
value = 3
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "squares.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("squares", None)
    open_dataset.cache_clear()


def opened(seen: Source) -> UserDataset:
    """Return the dataset as this process has opened it."""
    assert isinstance(seen, ItemSource)
    return open_dataset(seen.named, seen.roots, seen.run)


def rows_of(seen: Source, shuffle: str = "rows", transform: object = None) -> RowReader:
    order = SampleOrder(seen.unit_rows, shards=4, batch_size=40, seed=5, epochs=2, shuffle=shuffle)  # type: ignore[arg-type]
    return RowReader(source=seen, sample_order=order, seed=5, transform=transform, block_rows=16)  # type: ignore[arg-type]


def epoch(rows: RowReader, number: int = 0) -> list[int]:
    """Return the items of an epoch, in the order of shards and their steps."""
    found = []
    for shard in range(4):
        start, stop = (rows.sample_order.rows_before(shard, number + one) for one in (0, 1))
        for row_range in rows.sample_order.row_ranges_between(shard, start, stop):
            table = rows.read(row_range)
            assert table.column("_0").to_pylist() == [[one, one**2] for one in table.column("_1").to_pylist()]
            found += table.column("_1").to_pylist()
    return found


@pytest.mark.parametrize("spec", ["squares:thousand", "squares:many"])
def test_every_item_is_read_once_in_an_epoch(root: Path, spec: str) -> None:
    seen = returned_dataset(spec, [root], scattered=True)
    assert (seen.rows, seen.unit_rows[0], seen.unit_rows[-1]) == (1000, BLOCK, 1000 % BLOCK)
    rows = rows_of(seen)
    first, second = epoch(rows), epoch(rows, 1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second


def test_blocks_are_scattered_over_the_dataset_if_it_is_shuffled(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root], scattered=True)
    items = seen.read_unit(3).column("_1").to_pylist()
    assert max(items) - min(items) > 500
    plain = returned_dataset("squares:thousand", [root])
    assert epoch(rows_of(plain, "none")) == list(range(1000))
    assert plain.fingerprint == seen.fingerprint


def test_only_the_items_of_a_range_are_read(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root], scattered=True)
    rows, dataset = rows_of(seen), opened(seen).value
    for row_range in rows.sample_order.row_ranges(2, 7):
        dataset.asked.clear()
        table = rows.read(row_range)
        assert dataset.asked == table.column("_1").to_pylist()


@pytest.mark.parametrize("transform", [None, lambda table, rng: table.append_column("n", [rng.random(table.num_rows)])])
def test_a_part_of_a_unit_has_the_rows_of_the_whole(root: Path, transform: object) -> None:
    rows = rows_of(returned_dataset("squares:thousand", [root], scattered=True), transform=transform)
    for row_range in rows.sample_order.row_ranges_between(1, 0, 90):
        assert rows.read(row_range).equals(rows.cut(rows.source.read_unit(row_range.unit), row_range))


def test_ids_belong_to_places_and_are_unique(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root], scattered=True)
    ids = np.concatenate([seen.read_unit(unit).column(ROW_ID).to_numpy() for unit in range(len(seen.unit_rows))])
    assert len(set(ids.tolist())) == 1000


def test_rows_are_named_by_their_items(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root], scattered=True)
    rows = rows_of(seen)
    (row_range, *_) = rows.sample_order.row_ranges(1, 0)
    items = rows.read(row_range).column("_1").to_pylist()[:3]
    assert named_rows(seen, rows.sample_order, 1, 0, 3) == f"items {', '.join(map(str, items))} of squares:thousand"


def in_groups(root: Path, spec: str = "squares:words") -> ItemSource:
    seen = returned_dataset(spec, [root], scattered=True)
    assert isinstance(seen, ItemSource)
    return seen.by_length("ids", 40, 10)


def test_items_of_similar_length_are_together_and_each_is_used_once_an_epoch(root: Path) -> None:
    seen = in_groups(root)
    order = SampleOrder(seen.unit_rows, shards=4, batch_size=40, seed=5, epochs=3)
    rows = RowReader(source=seen, sample_order=order, seed=5, transform=None, block_rows=16)
    spread, used = [], dict[int, list[int]]()
    for shard in range(4):
        for step in range(order.steps):
            tables = [rows.read(one) for one in order.row_ranges(shard, step)]
            for one, table in zip(order.row_ranges(shard, step), tables, strict=True):
                used.setdefault(one.epoch, []).extend(table.column("number").to_pylist())
            lengths = [len(ids) for table in tables for ids in table.column("ids").to_pylist()]
            spread.append(max(lengths) - sum(lengths) / len(lengths))
    assert [sorted(one) for one in used.values()] == [list(range(600))] * 3
    assert used[0] != used[1] != used[2]
    # Of ten rows with 1 to 97 values each, in any order, the longest has about forty more than the mean.
    assert sum(spread) / len(spread) < 15
    assert seen.unit_rows == (80,) * 7 + (40,)


def test_the_examples_hold() -> None:
    assert doctest.testmod(length_groups).failed == 0


def test_windows_are_sorted_one_by_one_and_hold_whole_blocks() -> None:
    lengths = np.arange(1000)
    found = length_groups.length_groups("ids", lengths, np.random.default_rng(0).permutation(1000), 4, 3)
    # 200 rows, and the rest of the ninth block of 24.
    assert found.block == 24
    for start in range(0, 1000, 216):
        inside = found.order[start : start + 216]
        assert inside.tolist() == sorted(inside.tolist(), reverse=True)
    assert sorted(found.order.tolist()) == list(range(1000))


def test_a_worker_takes_the_groups_of_the_driver_and_reads_no_lengths(root: Path) -> None:
    seen = in_groups(root)
    again = seen_again(seen, root)
    assert isinstance(again, ItemSource)
    assert again == seen
    assert again.read_unit(3).equals(seen.read_unit(3))
    assert again.read_rows(3, np.array([5, 1])).column("number").to_pylist() == [
        seen.read_unit(3).column("number").to_pylist()[place] for place in (5, 1)
    ]


def test_other_lengths_are_other_data(root: Path) -> None:
    seen = in_groups(root)
    then = json.loads(json.dumps(seen.describe()))
    assert differences(seen.describe(), then) == []
    assert seen.fingerprint != returned_dataset("squares:words", [root], scattered=True).fingerprint
    then["dataset"]["groups_sha256"] = "0"
    assert changes_of(seen.describe()["dataset"], then["dataset"]) == ["its items are grouped by other lengths"]
    assert in_groups(root, "squares:longer").fingerprint != seen.fingerprint


def test_a_column_without_lengths_is_refused(root: Path) -> None:
    seen = returned_dataset("squares:words", [root], scattered=True)
    assert isinstance(seen, ItemSource)
    with pytest.raises(DataError, match="it has no column 'tokens'"):
        seen.by_length("tokens", 40, 10)
    with pytest.raises(DataError, match=r"the column 'x' is \w+, which says no length"):
        seen.by_length("x", 40, 10)
    assert sorted(seen.by_length("number", 40, 10).groups.order[:5].tolist()) == [595, 596, 597, 598, 599]  # type: ignore[union-attr]


def test_large_datasets_have_larger_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "BLOCKS", 4)
    seen = returned_dataset("squares:thousand", [root])
    assert seen.unit_rows == (256, 256, 256, 232)


def test_another_length_content_or_source_has_another_fingerprint(root: Path) -> None:
    seen = {name: returned_dataset(f"squares:{name}", [root]) for name in ("thousand", "shifted", "fewer", "many")}
    assert len({one.fingerprint for one in seen.values()}) == 4
    said = {name: json.loads(json.dumps(one.describe())) for name, one in seen.items()}
    assert differences(seen["thousand"].describe(), said["thousand"]) == []
    source = "the source of its function differs"
    assert differences(said["fewer"], said["thousand"]) == ["it has 999 items, not 1000", source]
    assert differences(said["many"], said["thousand"]) == [source]
    (items, _) = differences(said["shifted"], said["thousand"])
    assert items.startswith("64 of 64 items differ, such as item ")
    assert differences(said["many"], {"files": []}) == ["only one of them is at a path"]
    assert changes_of(said["many"]["dataset"], None)


def test_a_worker_sees_the_same_dataset_again(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root], scattered=True)
    assert seen_again(seen, root) == seen


def test_items_that_change_between_reads_are_refused(root: Path) -> None:
    with pytest.raises(DataChanged, match=r"(?s)item \d+ is not the same each.*random numbers in data.transform"):
        returned_dataset("squares:random", [root])


def test_an_item_that_changes_later_is_noticed_when_it_is_read(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root])
    opened(seen).value.shift = 1
    assert isinstance(seen, ItemSource)
    mark = next(iter(seen.marks))
    with pytest.raises(DataChanged, match=f"item {mark} is not the same"):
        seen.read_unit(mark // BLOCK)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("empty", "the dataset has no items"),
        ("unsized", "Unsized has no length.*define __len__"),
        ("splits", "the function returned a dict with the keys train, test.*return one of its values"),
        ("nothing", "the function returned a NoneType"),
        ("loader", "the function returned a DataLoader.*return its `dataset`"),
        ("reserved", "item 0: has a field '_raytrain_id', a name reserved"),
        ("half_precise", r"item \d+: field '_' is of torch.bfloat16, which Arrow cannot hold"),
        ("pointers", r"item \d+: field '_' is .*object"),
    ],
)
def test_what_is_no_dataset_is_refused(root: Path, name: str, what: str) -> None:
    with pytest.raises(DataError, match=f"(?s)squares:{name}: {what}"):
        returned_dataset(f"squares:{name}", [root])


def test_errors_of_the_users_code_are_named_and_show_its_frames(root: Path) -> None:
    with pytest.raises(TaskError, match="the function raised RuntimeError: no network") as raised:
        returned_dataset("squares:raises", [root])
    assert "def raises" in raised.value.user_traceback
    with pytest.raises(TaskError, match="squares:value is of type int"):
        returned_dataset("squares:value", [root])
    seen = returned_dataset("squares:thousand", [root])
    opened(seen).value.broken = 70
    with pytest.raises(TaskError, match="item 70 raised ValueError: no such image") as raised:
        seen.read_unit(70 // BLOCK)
    assert "no such image" in raised.value.user_traceback


def test_a_dataset_that_returns_too_few_items_is_refused(root: Path) -> None:
    seen = returned_dataset("squares:many", [root])
    opened(seen).value.most = 3
    with pytest.raises(DataError, match="__getitems__ returned 3 items for 32 indices"):
        seen.read_unit(0)


def test_a_list_is_a_dataset(root: Path) -> None:
    seen = returned_dataset("squares:listed", [root])
    assert [seen.read_unit(unit).column("x").to_pylist() for unit in (0, 1)] == [list(range(32)), list(range(32, 40))]


def test_another_run_in_the_same_process_sees_changed_data(root: Path) -> None:
    torch.save(torch.arange(40), root / "rows.pt")
    before = returned_dataset("squares:stored", [root])
    assert before.read_unit(0).column("_").to_pylist() == list(range(32))
    torch.save(torch.arange(40) + 5, root / "rows.pt")
    after = returned_dataset("squares:stored", [root])
    assert after.fingerprint != before.fingerprint
    assert after.read_unit(0).column("_").to_pylist() == list(range(5, 37))


def test_two_parts_of_a_random_split_are_disjoint(root: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    seen = [returned_dataset("squares:first_half", [root])]
    # The generators of the process are as before; another process may have drawn more, or fewer.
    assert torch.equal(torch.rand(2), expected)
    seen.append(returned_dataset("squares:second_half", [root]))
    items = [
        {item for unit in range(len(one.unit_rows)) for item in one.read_unit(unit).column("_1").to_pylist()}
        for one in seen
    ]
    assert (len(items[0]), len(items[1]), len(items[0] | items[1])) == (600, 400, 1000)


def test_a_field_without_values_has_the_type_that_hugging_face_declares(root: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": None if number < 199 else 7} for number in range(200)]
    module = sys.modules.setdefault("squares", types.ModuleType("squares"))
    module.declared = lambda: datasets.Dataset.from_list(  # type: ignore[attr-defined]
        rows, features=datasets.Features({"x": datasets.Value("int32")})
    )
    seen = returned_dataset("squares:declared", [root])
    assert seen.schema.field("x").type == "int32"
    assert seen.read_unit(6).column("x").to_pylist() == [None] * 7 + [7]


def test_fewer_items_than_shards_are_refused_alone_in_a_mix_and_with_a_tokenizer(root: Path) -> None:
    seen = returned_dataset("squares:thousand", [root])
    both, file = mixed([seen, seen]), TokenizerFile("somewhere", "0" * 64)
    for one in (seen, both, TokenizedSource(**facts_of(both), source=both, tokenizer=file)):
        check_enough(one, 1000)
        with pytest.raises(DataError, match=r"the data has 1000 rows, fewer than data\.shards = 1001"):
            check_enough(one, 1001)
