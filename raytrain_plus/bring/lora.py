"""Low-rank adapters (LoRA) of `peft`: a frozen model, beside some of whose modules small ones are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from raytrain_plus.errors import TaskError, first_line, listed

TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""How names of classes end -> the `task_type` of `peft`, which says which head is trained as a whole."""
UNUSED = ".original_module."
"""Part of the names of weights that `peft` keeps beside those that it trains in their place."""


def with_adapter(model: nn.Module, settings: Mapping[str, Any], where: str) -> nn.Module:
    """Return the model with a new adapter, in training mode; all else is frozen.

    `settings`: of `peft.LoraConfig`. Raises `TaskError` if `peft` is not installed, or does not take them.
    """
    if importlib.util.find_spec("peft") is None:
        raise TaskError(
            "the package 'peft' is not installed here", where=where, remedy="pip install 'raytrain-plus[peft]'"
        )
    import peft

    kind = next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)
    try:
        config = peft.LoraConfig(**{"task_type": kind, **settings})
        with warnings.catch_warnings():
            # It sets what it warns of, and uses what a newer Transformers calls by another name.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            adapted: nn.Module = peft.get_peft_model(model, config)
    except (TypeError, ValueError, KeyError) as error:
        raise TaskError(
            f"peft does not take these settings: {first_line(error)}",
            where=where,
            expected="settings of peft.LoraConfig, such as {r: 8, target_modules: [q_proj, v_proj]}; the model has "
            f"{listed(linear_modules(model))}",
        ) from error
    return adapted.train()


def linear_modules(model: nn.Module) -> list[str]:
    """Return the last parts of the names of the modules that can have an adapter, each once."""
    kinds = ("Linear", "Conv1D", "Embedding")
    names = (name for name, one in model.named_modules() if type(one).__name__ in kinds)
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is one of `peft`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model of Transformers that an adapter belongs to; any other model itself."""
    base: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]
    return base


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the frozen weights that a model computes with."""
    return [name for name, value in model.named_parameters() if not value.requires_grad and UNUSED not in name]
