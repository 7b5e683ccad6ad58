"""The ready functions make the batches that PyTorch's own make."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

from raytrain_plus.data.reading.microbatches import collates_rows
from raytrain_plus.data.values.collate import READY, pack, pad, set_collate
from raytrain_plus.errors import TaskError
from raytrain_plus.job.bounds import COLLATES
from raytrain_plus.task import Task, column_tensor

IDS = [[5, 6, 7], [8], [], [9, 10]]


def same(given: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(given, torch.as_tensor(expected), rtol=0, atol=0)


def test_lists_are_filled_up_to_the_longest_with_a_mask() -> None:
    batch = pad(
        pa.table({"input_ids": pa.array(IDS), "labels": pa.array(IDS), "label": [0, 1, 0, 1], "text": list("abcd")})
    )
    same(batch["input_ids"], pad_sequence([torch.tensor(one, dtype=torch.int64) for one in IDS], batch_first=True))
    same(batch["labels"], [[5, 6, 7], [8, -100, -100], [-100] * 3, [9, 10, -100]])
    same(batch["attention_mask"], [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    same(batch["label"], [0, 1, 0, 1])
    assert batch["text"] == ["a", "b", "c", "d"]
    assert list(batch) == ["input_ids", "labels", "label", "text", "attention_mask"]


def test_columns_of_other_lengths_get_masks_of_their_own() -> None:
    batch = pad(
        pa.table(
            {"a": pa.array([[1.5], [2.0, 3.0]]), "b": pa.array([[1, 2], [3]]), "c": pa.array([[True], [False, True]])}
        )
    )
    same(batch["a"], torch.tensor([[1.5, 0], [2, 3]], dtype=torch.float64))
    same(batch["c"], [[True, False], [False, True]])
    same(batch["attention_mask"], [[1, 0], [1, 1]])
    same(batch["b_mask"], [[1, 1], [1, 0]])
    assert "c_mask" not in batch


def test_a_slice_of_several_chunks_is_one_batch() -> None:
    table = pa.concat_tables([pa.table({"a": pa.array([[1], [2, 3]])}), pa.table({"a": pa.array([[4, 5, 6]])})]).slice(
        1
    )
    same(pad(table)["a"], [[2, 3, 0], [4, 5, 6]])


def test_fixed_lists_and_narrow_types_are_filled_up_right() -> None:
    ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    batch = pad(pa.table({"input_ids": ids, "y": pa.array([[1], [1, 2]])}))
    same(batch["attention_mask"], [[1, 1], [1, 1]])
    same(batch["y_mask"], [[1, 0], [1, 1]])
    for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.bool_(), pa.int8()):
        given = pa.table({"labels": pa.array([[1], [1, 0]], pa.list_(pa.int64())).cast(pa.list_(kind))})
        assert pad(given)["labels"].tolist() == [[1, -100], [1, 0]], kind


def test_a_mask_of_the_data_is_kept() -> None:
    given = pa.table({"input_ids": pa.array([[1], [2, 3]]), "attention_mask": pa.array([[1], [0, 1]])})
    same(pad(given)["attention_mask"], [[1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([[1], None]), "holds 1 null"),
        (pa.array([[1, None]]), "holds 1 null"),
        (pa.array(["a", None]), "holds 1 null"),
        (pa.array([["a"]]), "not numeric"),
        (pa.array([b"a"]), "not numeric"),
    ],
)
def test_what_cannot_be_filled_up_is_named(column: pa.Array, what: str) -> None:
    with pytest.raises(TypeError, match=f"column 'a' .*{what}"):
        pad(pa.table({"a": column}))


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (b"png", "set data.image_size if these are images, or override Task.collate"),
        ("text", "set data.tokenizer if this is text, make numbers of it in data.transform, or override Task.collate"),
        ({"a": 1}, "set data.collate, or override Task.collate"),
    ],
)
def test_the_remedy_fits_what_is_not_numeric(value: Any, remedy: str) -> None:
    with pytest.raises(TypeError, match="which is not numeric") as caught:
        column_tensor(pa.table({"x": [value]}), "x")
    assert str(caught.value).endswith(f": {remedy}")


class Own(Task):
    def collate(self, table: pa.Table) -> Any:
        return "own"


def double(table: pa.Table) -> Any:
    return 2 * table.num_rows


def test_a_job_says_how_its_task_collates() -> None:
    table = pa.table({"a": [1, 2]})
    task = Own()
    set_collate(task, None)
    assert task.collate(table) == "own"
    set_collate(task, "stack")
    same(task.collate(table)["a"], [1, 2])
    assert collates_rows(task.collate)
    set_collate(task, "pad")
    assert not collates_rows(task.collate)
    set_collate(task, f"{__name__}:double")
    assert task.collate(table) == 4
    with pytest.raises(TaskError, match="nothing"):
        set_collate(task, f"{__name__}:nothing")
    assert tuple(READY) == COLLATES


def test_padding_gives_the_loss_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    embed, head = nn.Embedding(20, 8), nn.Linear(8, 2)
    labels = [0, 1, 1, 0]

    def loss(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean = (embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return nn.functional.cross_entropy(head(mean), torch.tensor(labels))

    batch = pad(pa.table({"input_ids": pa.array(IDS), "label": labels}))
    plain = pad_sequence([torch.tensor(one, dtype=torch.int64) for one in IDS], batch_first=True)
    expected = loss(plain, (torch.arange(3) < torch.tensor([len(one) for one in IDS])[:, None]).float())
    torch.testing.assert_close(loss(batch["input_ids"], batch["attention_mask"].float()), expected, rtol=1e-6, atol=0)


def test_rows_are_packed_into_one_sequence() -> None:
    labels = [[1, 2, 3], [4], [], [5, 6]]
    batch = pack(
        pa.table(
            {
                "input_ids": pa.array(IDS, pa.list_(pa.int32())),
                "labels": pa.array(labels, pa.list_(pa.uint8())),
                "weights": pa.array([[0.5] * len(one) for one in IDS], pa.large_list(pa.float32())),
                "box": pa.array([[1, 2]] * 4, pa.list_(pa.int64(), 2)),
                "group": [3, 1, 2, 0],
                "text": list("abcd"),
                "attention_mask": [[1] * len(one) for one in IDS],
            }
        )
    )
    same(batch["input_ids"], [[5, 6, 7, 8, 9, 10]])
    same(batch["labels"], [[-100, 2, 3, -100, -100, 6]])
    same(batch["position_ids"], [[0, 1, 2, 0, 0, 1]])
    same(batch["cu_seq_lens"], torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32))
    same(batch["weights"], torch.full((1, 6), 0.5))
    same(batch["box"], [[1, 2]] * 4)
    same(batch["group"], [3, 1, 2, 0])
    assert batch["text"] == ["a", "b", "c", "d"]
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["position_ids"].dtype == torch.int64
    assert "attention_mask" not in batch


def test_the_packed_batch_is_that_of_transformers() -> None:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    documents = [one for one in IDS if one]
    expected = collator([{"input_ids": one, "labels": one} for one in documents])
    batch = pack(pa.table({"input_ids": pa.array(documents), "labels": pa.array(documents)}))
    for name in ("input_ids", "labels", "position_ids"):
        same(batch[name], expected[name])
    same(batch["cu_seq_lens"], expected["cu_seq_lens_q"])


def test_a_slice_and_lists_of_one_size_are_packed() -> None:
    ids = pa.chunked_array([pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), [[5, 6]]])
    table = pa.table({"input_ids": ids, "labels": ids, "label": [1, 2, 3]}).slice(1)
    batch = pack(table)
    same(batch["input_ids"], [[3, 4, 5, 6]])
    same(batch["labels"], [[-100, 4, -100, 6]])
    same(batch["label"], [2, 3])
    same(pack(pa.table({"a": [[1], [2, 3]]}))["a"], [[1, 2, 3]])


def test_empty_rows_are_documents_without_tokens() -> None:
    lists = [[], [1, 2], [], []]
    batch = pack(pa.table({"input_ids": lists, "labels": lists}))
    same(batch["labels"], [[-100, 2]])
    same(batch["position_ids"], [[0, 1]])
    same(batch["cu_seq_lens"], torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32))


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"a": [1]}, r"needs a column of lists, such as 'input_ids'; the columns are a \(int64\)"),
        ({"input_ids": [[1]], "b": [[1, 2]]}, "column 'b' holds lists of other lengths than 'input_ids'"),
        ({"input_ids": [[1]], "position_ids": [[1]]}, "column 'position_ids' has the name of a tensor"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "column 'attention_mask' masks tokens"),
        ({"input_ids": pa.array([[], []], pa.list_(pa.int64()))}, "column 'input_ids' is empty in all 2 rows"),
        ({"input_ids": [[1], None]}, "column 'input_ids' holds 1 null"),
        ({"input_ids": [["a"]]}, "not numeric"),
    ],
)
def test_what_cannot_be_packed_is_named(columns: dict[str, Any], what: str) -> None:
    with pytest.raises(TypeError, match=what):
        pack(pa.table(columns))
