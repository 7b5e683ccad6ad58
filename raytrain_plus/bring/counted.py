"""What a batch of a Transformers model counts: the values of which its own loss is the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100
"""A label that losses leave out."""
ROWS = ("ForCTC", "ObjectDetection", "InstanceSegmentation", "ForSegmentation", "ForRNNT", "ForTDT")
"""Parts of the names of losses that are means over rows though their labels have several values in each."""
PIXELS = "ForSemanticSegmentation"

CAUSAL = {
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "CTRLLMHeadModel",
    "GPT2LMHeadModel",
    "OpenAIGPTLMHeadModel",
    "ReformerModelWithLMHead",
}
"""The models whose loss is the causal one because their names say none (`PreTrainedModel.loss_function`)."""
ALIGNED = {
    "BartForCausalLM",
    "BigBirdPegasusForCausalLM",
    "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM",
    "MBartForCausalLM",
    "MarianForCausalLM",
    "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM",
    "MvpForCausalLM",
    "PLBartForCausalLM",
    "PegasusForCausalLM",
    "ProphetNetForCausalLM",
    "TrOCRForCausalLM",
    "WhisperForCausalLM",
}
"""The decoders whose own loss compares each position with the label at the same one."""


def counted(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return how many labels the model's mean loss of a batch is over, on their device; None for the rows.

    These are the labels that are not -100; a causal model predicts none at the first position. It is what
    `transformers.Trainer` divides the sum of a step by (`_get_num_items_in_batch`), and counts the positions that
    `ForCausalLMLoss` does also for the models of which Trainer does not know it, such as GPT-2.
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or _over_rows(model):
        return None
    if "shift_labels" not in batch and shifts_labels(model):
        labels = labels[..., 1:]
    ignored = IGNORED
    if PIXELS in str(getattr(model, "loss_type", None)):
        ignored = getattr(model.config, "semantic_loss_ignore_index", 255)
    return (labels != ignored).sum()


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the label at a position is what the model is to predict at the one before."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or type(model).__name__ in ALIGNED:
        return False
    if type(model).__name__ in CAUSAL:
        return True
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss


def _over_rows(model: nn.Module) -> bool:
    named = str(getattr(model, "loss_type", None))
    regression = getattr(getattr(model, "config", None), "problem_type", None) == "regression"
    return regression or any(part in named for part in ROWS)
