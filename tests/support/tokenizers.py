"""Small tokenizers, and jobs that use them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from raytrain_plus import Data, Evaluate, Job

WORDS = ("the", "plot", "was", "not", "very", "good", "but", "music", "and", "cast", "moving", "in", "this", "film")


def texts(count: int) -> list[str]:
    rng = random.Random(count)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(9))) for _ in range(count)]


def save(folder: Path, change: int = 0) -> Tokenizer:
    """Write a BPE with special tokens, truncation and padding; return it as it is used, without padding."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=50, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts(50), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(10 + change)
    tokenizer.enable_padding(length=16)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def job(folder: Path, saved: Path | None, **settings: Any) -> Job:
    for name in ("data", "held_out"):
        (folder / name).mkdir(exist_ok=True)
        table = pa.table({"text": texts(40), "number": range(40)})
        pq.write_table(table, folder / name / "0.parquet", row_group_size=16)
    data = Data(
        path=str(folder / "data"),
        batch_size=16,
        shards=2,
        tokenizer=None if saved is None else str(saved),
        **settings,
    )
    evaluate = Evaluate(path=str(folder / "held_out"), every_steps=1)
    return Job(name="x", task="t:T", data=data, steps=2, evaluate=evaluate)
