"""Fine-tune a Hugging Face model to classify texts: is a film review kind or not?

Without `pretrained` a small BERT starts from random weights, with a tokenizer made from the texts. Nothing is fetched:
`pretrained` is a folder on disk, as `save_pretrained` writes it, with model and tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

from raytrain_plus import Task

LABELS = 2
LONGEST = 64
VOCABULARY = 512
TOKENIZER = Path(__file__).parent / "data" / "sentiment" / "train" / "_tokenizer.json"
"""Written by `prepare` beside the training texts."""


class Sentiment(Task):
    """Classify a text. `pretrained`: a model's folder, absolute or relative to the working directory."""

    def __init__(self, pretrained: str | None = None, lr: float = 5e-4) -> None:
        self.pretrained, self.lr = pretrained, lr
        if pretrained is not None and not Path(pretrained, "tokenizer.json").is_file():
            raise FileNotFoundError(f"pretrained: {pretrained} has no tokenizer.json; save model and tokenizer there")
        self._tokenizer: Tokenizer | None = None

    def config(self) -> Any:
        if self.pretrained is not None:
            return AutoConfig.from_pretrained(self.pretrained, num_labels=LABELS, local_files_only=True)
        return BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LONGEST,
            num_labels=LABELS,
        )

    def model(self) -> nn.Module:
        if self.pretrained is None:
            model: nn.Module = AutoModelForSequenceClassification.from_config(self.config())
        else:
            model = AutoModelForSequenceClassification.from_pretrained(
                self.pretrained, config=self.config(), local_files_only=True
            )
        return model

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=self.lr)

    def collate(self, table: pa.Table) -> dict[str, torch.Tensor]:
        """Return the tokens of a table of texts, padded to the longest one."""
        encoded = self.tokenizer().encode_batch(table.column("text").to_pylist())
        return {
            "input_ids": torch.tensor([one.ids for one in encoded]),
            "attention_mask": torch.tensor([one.attention_mask for one in encoded]),
            "labels": torch.tensor(table.column("label").to_pylist()),
        }

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; it is complete before it is kept, because two threads may call `collate` at once."""
        if self._tokenizer is None:
            file = TOKENIZER if self.pretrained is None else Path(self.pretrained, "tokenizer.json")
            loaded = Tokenizer.from_file(str(file))
            pad = self.config().pad_token_id
            loaded.enable_padding(pad_id=pad, pad_token=loaded.id_to_token(pad))
            loaded.enable_truncation(LONGEST)
            self._tokenizer = loaded
        return self._tokenizer

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        answer = model(**batch)
        return {"loss": answer.loss, "metrics": {"accuracy": accuracy(answer.logits, batch["labels"])}}

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        answer = model(**batch)
        return {"loss": answer.loss, "accuracy": accuracy(answer.logits, batch["labels"])}


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (scores.argmax(dim=1) == labels).float().mean()


def reviews() -> list[tuple[str, int]]:
    """Return 2,400 made-up reviews, the same ones each time, with 1 for a kind one. Put your own texts here."""
    kind, unkind = ("good", "great", "moving", "funny"), ("bad", "dull", "awful", "boring")
    rng = random.Random(0)
    found = []
    for _ in range(2400):
        label, negated = rng.randrange(2), rng.random() < 0.3
        word = rng.choice(kind if (label == 1) != negated else unkind)
        subject = rng.choice(("plot", "music", "cast", "film", "ending", "dialogue", "camera", "story"))
        opening = rng.choice(("the", "for me the", "i think the", "as so often the", "my friends say the"))
        found.append((f"{opening} {subject} was{' not' * negated} {rng.choice(('', 'very ', 'rather '))}{word}", label))
    return found


def prepare(folder: Path, name: str) -> None:
    """Write the split `name` into `folder`: every sixth review is held out. Beside the others goes their tokenizer."""
    held_out = name == "held_out"
    chosen = [review for number, review in enumerate(reviews()) if (number % 6 == 0) == held_out]
    texts, labels = zip(*chosen, strict=True)
    table = pa.table({"text": list(texts), "label": list(labels)})
    pq.write_table(table, folder / "reviews.parquet", row_group_size=256, write_page_checksum=True)
    if not held_out:
        # Data paths ignore names that begin with _.
        trained(texts).save(str(folder / "_tokenizer.json"))


def trained(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with a token for each word of the texts; the same one for the same texts."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer
