"""The page of examples: it names every method of a task, and its Hugging Face task works."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from raytrain_plus import Task

PAGE = (Path(__file__).parents[3] / "examples" / "README.md").read_text()
TABLE = re.split(r"(?m)^## ", PAGE.partition("## Task\n")[2])[0]


def test_the_page_names_every_method_of_a_task_with_its_arguments() -> None:
    methods = inspect.getmembers(Task, inspect.isfunction)
    stated = {
        f"{name}({', '.join(list(inspect.signature(method).parameters)[1:])})"
        for name, method in methods
        if not name.startswith("_")
    }
    assert len(stated) > 8
    assert set(re.findall(r"(?m)^\| `(\w+\(.*?\))` \| .+ \| .+ \|$", TABLE)) == stated


def test_the_hugging_face_task_of_the_page_makes_a_step(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    [code] = [block for block in re.findall("```python\n(.*?)```", PAGE, re.DOTALL) if "transformers" in block]
    defined: dict[str, Any] = {}
    exec(code, defined)
    task = defined["Classify"](str(tmp_path))
    batch = task.collate(pa.table({"text": ["good film", "bad", "a bad film"], "label": [1, 0, 0]}))
    assert batch["input_ids"].tolist() == [[2, 4, 0], [3, 0, 0], [1, 3, 4]]
    model = task.model()
    answer = task.loss(model, batch)
    answer["loss"].backward()
    assert torch.isfinite(answer["loss"])
    assert set(answer) == {"loss", "metrics"}
    # The saved weights are used, and trained.
    saved = transformers.BertModel.from_pretrained(tmp_path).embeddings.word_embeddings.weight
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, saved)
    assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0
