"""Train a byte-level GPT (0.9 M parameters) on text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task, schedules

CONTEXT = 128
VOCABULARY = 256


class Embed(nn.Module):
    """Bytes to vectors: (rows, context) -> (rows, context, width)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.dropout(self.byte(x) + self.place.weight[: x.shape[1]])
        return vectors


class Block(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and with a residual connection."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.qkv, self.mix, self.up, self.down):
            nn.init.normal_(layer.weight, std=0.02 / (math.sqrt(2 * depth) if layer in (self.mix, self.down) else 1))
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        # As many heads as are here: with tensor slices, a worker may have some of them.
        split = self.qkv(self.norm1(x)).view(rows, length, 3, -1, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.mix(attended.transpose(1, 2).reshape(rows, length, -1)))
        fed: torch.Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + fed


class Head(nn.Module):
    """Vectors to scores of the next byte: (rows, context, width) -> (rows, context, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.norm(x))
        return scores


class ByteGPT(Task):
    """Predict the next byte of Python source."""

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        lr: float = 2e-3,
        warmup: int = 20,
    ) -> None:
        self.width, self.depth, self.heads, self.dropout = width, depth, heads, dropout
        self.lr, self.warmup = lr, warmup

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        blocks = {
            f"block{i}": lambda: Block(self.width, self.heads, self.depth, self.dropout) for i in range(self.depth)
        }
        return {"embed": lambda: Embed(self.width, self.dropout), **blocks, "head": lambda: Head(self.width)}

    def tensor(self) -> dict[str, str]:
        return {
            "block*.qkv": "colwise",
            "block*.mix": "rowwise",
            "block*.up": "colwise",
            "block*.down": "rowwise",
            "embed.byte": "vocab",
            "head.out": "colwise",
        }

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(parameters)
        matrices = [value for _, value in named if value.dim() > 1]
        others = [value for _, value in named if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return schedules.warmup_cosine(optimizer, self.run.total_steps, warmup=self.warmup, end=0.1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        text = batch["bytes"].long()
        scores = model(text[:, :-1])
        return F.cross_entropy(scores.reshape(-1, VOCABULARY).float(), text[:, 1:].reshape(-1))

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def show(self, model: nn.Module) -> str:
        """Return 300 bytes that the model writes after `def `; the same weights write the same bytes."""
        generator = torch.Generator().manual_seed(0)
        text = list(b"def ")
        for _ in range(300):
            scores = model(torch.tensor([text[-CONTEXT:]], device=next(model.parameters()).device))[0, -1]
            chances = torch.softmax(scores.float().cpu() / 0.8, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return printable(bytes(text))


def printable(text: bytes) -> str:
    """Return printable text and line ends unchanged, and every other character or byte as its escape.

    >>> print(printable(b"a = 1\\n\\x1b[31m\\xff"))
    a = 1
    \\x1b[31m\\xff
    """
    characters = text.decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in characters)


LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def prepare(folder: Path, name: str, library: Path = LIBRARY) -> None:
    """Write the split `name` (train or held_out) into `folder`: rows of 129 bytes, in row groups of 512.

    No window of source is in two rows, and no source file is in both splits.
    """
    windows = []
    for source in sources(library):
        if held_out(source) == (name == "held_out"):
            text = np.frombuffer((library / source).read_bytes(), dtype=np.uint8)
            whole = len(text) // (CONTEXT + 1) * (CONTEXT + 1)
            windows.append(text[:whole].reshape(-1, CONTEXT + 1))
    rows = np.concatenate(windows)
    if name == "held_out":
        rows = rows[:: max(1, len(rows) // 480)][:480]  # enough for a metric, and few enough for frequent evaluations
    files = 1 if name == "held_out" else 4
    for number, part in enumerate(np.array_split(rows, files)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), CONTEXT + 1)
        file = folder / f"part-{number}.parquet"
        pq.write_table(pa.table({"bytes": column}), file, row_group_size=512, write_page_checksum=True)


def sources(library: Path) -> list[str]:
    """Return the library's own modules, sorted: without tests, installed packages and machine-specific files."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    found = (path.relative_to(library) for path in library.rglob("*.py"))
    own = (path for path in found if not left_out & set(path.parts) and not path.parts[0].startswith("config-"))
    return sorted(path.as_posix() for path in own if not path.name.startswith(("_sysconfigdata", "sitecustomize")))


def held_out(source: str) -> bool:
    """Return whether a file is for evaluation: one in sixteen, by a hash of its name, so equal on every machine."""
    return hashlib.sha256(source.encode()).digest()[0] < 16
