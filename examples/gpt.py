"""Train a model of GPT-2's shape on tokens of text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from examples.byte_gpt import LIBRARY, Block, held_out, sources
from raytrain_plus import Task, schedules

TOKENS = 8192
"""The tokens of the tokenizer; the text, of 10 MB, is too short for GPT-2's 50,257."""
ROW = 1024 + 1
"""The tokens of a row: those that the largest model sees, and the last one that it predicts."""
END = "<|endoftext|>"
"""The token after each file."""


class Size(NamedTuple):
    """A model: its shape, the tokens that it sees at once, and a learning rate that suits it."""

    depth: int
    width: int
    heads: int
    context: int
    lr: float


SIZES = {
    "tiny": Size(depth=4, width=128, heads=4, context=128, lr=2e-3),
    "125m": Size(depth=12, width=768, heads=12, context=1024, lr=6e-4),
    "350m": Size(depth=24, width=1024, heads=16, context=1024, lr=3e-4),
}
"""125m and 350m have that many parameters with GPT-2's vocabulary, and 92 and 312 million with the one of `prepare`."""


class Embed(nn.Module):
    """Tokens to vectors: (rows, context) -> (rows, context, width)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.token(x) + self.place.weight[: x.shape[1]]
        return vectors


class Head(nn.Module):
    """Vectors to scores of the next token: (rows, context, width) -> (rows, context, vocabulary)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.norm(x))
        return scores


class GPT(Task):
    """Predict the next token. `vocabulary`: that of the data, padded here to a multiple of 64, which GPUs prefer."""

    def __init__(self, size: str = "125m", vocabulary: int = TOKENS) -> None:
        if size not in SIZES:
            raise ValueError(f"args.size is {size!r}; expected one of {', '.join(SIZES)}")
        self.size, self.vocabulary = SIZES[size], math.ceil(vocabulary / 64) * 64

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        depth, width, heads, context, _ = self.size
        blocks = {f"block{number}": lambda: Block(width, heads, depth, dropout=0.0) for number in range(depth)}
        embed, head = lambda: Embed(self.vocabulary, context, width), lambda: Head(self.vocabulary, width)
        return {"embed": embed, **blocks, "head": head}

    def tied(self) -> dict[str, str]:
        return {"head.out.weight": "embed.token.weight"}

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(parameters)
        matrices = [value for _, value in named if value.dim() > 1]
        others = [value for _, value in named if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.size.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return schedules.warmup_cosine(optimizer, self.run.total_steps, warmup=0.05, end=0.1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # A smaller model sees the beginning of each row.
        text = batch["tokens"][:, : self.size.context + 1].long()
        scores = model(text[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())


def prepare(folder: Path, name: str, library: Path = LIBRARY) -> None:
    """Write the split `name` (train or held_out) into `folder`: rows of 1025 tokens, and the tokenizer.

    The files of the split follow one another, each with the end token. The last tokens, too few for a row, are left
    out. The tokenizer is made of the training files alone, again for each split: the same files give the same one.
    """
    texts: dict[bool, list[str]] = {False: [], True: []}
    for source in sources(library):
        texts[held_out(source)].append((library / source).read_text("utf-8", "replace"))
    tokenizer = trained_tokenizer(texts[False])
    end = tokenizer.token_to_id(END)
    tokens = np.concatenate([[*tokenizer.encode(text).ids, end] for text in texts[name == "held_out"]])
    rows = pa.array(tokens[: len(tokens) // ROW * ROW].astype(np.int32))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(rows, ROW)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=64, write_page_checksum=True)
    tokenizer.save(str(folder / "_tokenizer.json"))  # hidden, because it holds no rows


def trained_tokenizer(texts: Sequence[str]) -> Any:
    """Return a byte-level BPE tokenizer with at most `TOKENS` tokens, made of these texts: the same for the same ones.

    Raises `ModuleNotFoundError` without the package tokenizers.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        what = "the package tokenizers is not installed: run `pip install '.[examples]'` on every machine"
        raise ModuleNotFoundError(what) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=[END], initial_alphabet=bytes_, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
