"""Tiny models of Transformers, and folders of them as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers

from raytrain_plus import Task
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes.task_loss import task_loss

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(28))]


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**settings: Any) -> Any:
    small = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**small, **settings}))


def qwen3_moe(**settings: Any) -> Any:
    small = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**small, **settings}))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def bert(kind: str = "BertForMaskedLM", **settings: Any) -> Any:
    small = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }
    return getattr(transformers, kind)(transformers.BertConfig(**{**small, **settings}))


KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "t5": t5,
    "vit": vit,
    "bert": bert,
}


def saved(folder: Path, kind: str | Any) -> Path:
    """Write a model of that kind, or this one, with a tokenizer's files beside it."""
    torch.manual_seed(0)
    model = KINDS[kind]() if isinstance(kind, str) else kind
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


def rows(kind: str, count: int = 8) -> pa.Table:
    """Return rows that a model of that kind takes; lists are of uneven lengths."""
    draw = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(4, 32, (length,), generator=draw).tolist()

    lengths = [3 + number % 5 for number in range(count)]
    if kind == "vit":
        images = torch.rand(count, 64, generator=draw).tolist()
        image = pa.array([[[row[8 * n : 8 * n + 8] for n in range(8)]] for row in images])
        return pa.table({"pixel_values": image, "labels": [number % 3 for number in range(count)]})
    ids = [tokens(length) for length in lengths]
    if kind == "t5":
        return pa.table({"input_ids": ids, "labels": [tokens(2 + number % 3) for number in range(count)]})
    if kind == "bert":
        return pa.table({"input_ids": ids, "labels": [[-100, *one[1:]] for one in ids]})
    return pa.table({"input_ids": ids})


def trained(task: Task, table: pa.Table, steps: int = 20) -> tuple[Any, list[float]]:
    """Return the model of a task after some steps with these rows, and the loss of each."""
    model = build_model(task, 0, torch.device("cpu")).module
    batch, losses = task.collate(table), []
    optimizer = task.optimizer((name, value) for name, value in model.named_parameters() if value.requires_grad)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task_loss(task, model, batch, table.num_rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses
