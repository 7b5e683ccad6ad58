"""A Trainer script of Transformers that trains on while machines come and go: is a film review kind or not?

`python reviews.py`, or with more workers: `raytrain run reviews.py --set workers.max=4`. Only the import of Trainer is
another one. The model and its tokenizer are made here, so that nothing is fetched; put a folder of your own in their
place, with `from_pretrained(FOLDER)`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from raytrain_plus.bring.transformers import Trainer

KIND, UNKIND = ("good", "great", "moving", "funny"), ("bad", "dull", "awful", "boring")
SUBJECTS = ("plot", "music", "cast", "film", "ending", "dialogue", "camera", "story")
OPENINGS = ("the", "for me the", "i think the", "as so often the", "my friends say the")


def reviews(count: int = 1200) -> list[tuple[str, int]]:
    """Return made-up reviews, the same ones each time, with 1 for a kind one."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        label, negated = rng.randrange(2), rng.random() < 0.3
        word = rng.choice(KIND if (label == 1) != negated else UNKIND)
        text = f"{rng.choice(OPENINGS)} {rng.choice(SUBJECTS)} was{' not' * negated} {word}"
        found.append((text, label))
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word."""
    words = dict.fromkeys(" ".join((*OPENINGS, *SUBJECTS, *KIND, *UNKIND, "was not")).split())
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def model(words: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=words, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return BertForSequenceClassification(config)


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(given.predictions.argmax(-1) == given.label_ids))}


def trainer(folder: str = "reviews", **arguments: Any) -> Trainer:
    """Return the trainer; `arguments` are more of `TrainingArguments`."""
    reads = tokenizer()
    rows = [{**reads(text, return_token_type_ids=False), "label": label} for text, label in reviews()]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 10,
        **arguments,
    }
    return Trainer(
        model(len(reads)),
        TrainingArguments(folder, **settings),
        train_dataset=rows[200:],
        eval_dataset=rows[:200],
        processing_class=reads,
        data_collator=DataCollatorWithPadding(reads),
        compute_metrics=accuracy,
        run={"workers": {"min": 1, "max": 2}},
    )


if __name__ == "__main__":
    made = trainer()
    print(made.train())
    print(made.evaluate())
