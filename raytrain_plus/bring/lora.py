"""Low-rank adapters (LoRA) of `peft`: a frozen model, beside some of whose modules small ones are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
BASE = ".base_layer."
"""Part of the names of the frozen weights of modules that have an adapter."""
DRAWN = ("gaussian", "orthogonal", "eva")
"""Settings of `init_lora_weights` that leave the frozen weights alone.

Others, such as "pissa", subtract from them what an adapter begins with, whose bits depend on the machine.
"""


def with_adapter(model: nn.Module, settings: Mapping[str, Any], new: Sequence[str], where: str) -> nn.Module:
    """Return the model with a new adapter, in training mode; all else is frozen.

    `settings`: of `peft.LoraConfig`. `new`: the weights of the model that are drawn, which must be trained. What is
    trained is float32. Raises `TaskError` if `peft` is not installed, or does not take the settings, and if they leave
    new weights as they are drawn.
    """
    if importlib.util.find_spec("peft") is None:
        raise TaskError(
            "the package 'peft' is not installed here", where=where, remedy="pip install 'raytrain-plus[peft]'"
        )
    import peft

    kind = next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        # The classes of `peft` for tasks pass on `input_ids`.
        kind = None
    try:
        config = peft.LoraConfig(**{"task_type": kind, **settings})
        with warnings.catch_warnings():
            # It sets what it warns of, and uses what a newer Transformers calls by another name.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")
            # Merging knows tied weights: see `write_folder`.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            adapted: nn.Module = peft.get_peft_model(model, config)
    except (TypeError, ValueError, KeyError) as error:
        raise TaskError(
            f"peft does not take these settings: {first_line(error)}",
            where=where,
            expected="settings of peft.LoraConfig, such as {r: 8, target_modules: [q_proj, v_proj]}; the model has "
            f"{listed(linear_modules(model))}",
        ) from error
    trained = {_in_base(name) for name, value in adapted.named_parameters() if value.requires_grad}
    if left := [name for name in new if name not in trained]:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in left)
        raise TaskError(
            f"the folder has no weights for {listed(left)}, and the adapter leaves them as they are drawn",
            where=where,
            remedy=f"train them as a whole: modules_to_save: [{', '.join(modules)}]",
        )
    for module in adapted.modules():
        _compute_in_float32(module)
    return adapted.train()


def _in_base(name: str) -> str:
    """Return the name, in the model without an adapter, of a weight that is trained as a whole.

    >>> _in_base("base_model.model.classifier.modules_to_save.default.weight")
    'classifier.weight'
    """
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


def _compute_in_float32(module: nn.Module) -> None:
    """Let a module compute in float32 whose own trained weights have fewer digits, in which small steps vanish."""
    own = [value for value in module.parameters(recurse=False) if value.requires_grad]
    if not any(value.dtype in (torch.bfloat16, torch.float16) for value in own):
        return
    for value in own:
        value.data = value.data.float()
    module.register_forward_pre_hook(_as_float32)


def _as_float32(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in inputs)


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
    """Return the names of the frozen weights that a model computes with, and that are as its files have them."""
    configs = getattr(model, "peft_config", {}).values()
    changed = any(
        isinstance(one.init_lora_weights, str) and one.init_lora_weights not in DRAWN
        for one in configs
        if hasattr(one, "init_lora_weights")
    )
    left = (UNUSED, *[BASE] * changed)
    return [
        name
        for name, value in model.named_parameters()
        if not value.requires_grad and not any(part in name for part in left)
    ]
