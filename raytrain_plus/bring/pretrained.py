"""Models in folders as Hugging Face's `save_pretrained` writes them: `config.json`, weights, tokenizer or processor."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError, first_line, listed
from raytrain_plus.runs.pretrained_folder import CONFIG, quiet
from raytrain_plus.training.model.opened_weights import INDEX, MODEL

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_library(where: str) -> None:
    """Raise `TaskError` if Transformers is not installed here. `where`: what needs it."""
    if importlib.util.find_spec("transformers") is None:
        raise TaskError(
            "the package 'transformers' is not installed here",
            where=where,
            remedy="pip install 'raytrain-plus[transformers]'",
        )


def check_folder(folder: Path, where: str) -> None:
    """Raise `TaskError` unless a folder has a configuration, and weights that are no pickles."""
    written = "a folder as model.save_pretrained(folder) writes it: config.json and model.safetensors"
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder}", where=where, expected=f"{written}, which every worker can read")
    if not (folder / CONFIG).is_file():
        raise TaskError(f"{folder} has no {CONFIG}", where=where, expected=written)
    if any((folder / name).is_file() for name in (MODEL, INDEX)):
        return
    pickled = [name for name in PICKLES if (folder / name).is_file()]
    raise TaskError(
        f"{folder} has its weights as a pickle only, {pickled[0]}" if pickled else f"{folder} has no {MODEL}",
        where=where,
        expected=written,
        remedy="open it where it is trusted, and write it anew with model.save_pretrained(folder)" if pickled else "",
    )


def config_of(folder: Path, changes: Mapping[str, Any], where: str) -> PretrainedConfig:
    """Return the configuration in a folder, with these `changes`. Raises `TaskError` if it is not usable."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, **changes)
    except Exception as error:
        raise TaskError(
            f"Transformers cannot use {folder / CONFIG}: {first_line(error)}",
            where=where,
            expected="the configuration of an architecture that the installed version knows",
        ) from error
    unknown = [name for name in changes if not hasattr(config, name)]
    if unknown:
        raise TaskError(f"{type(config).__name__} has no '{unknown[0]}'", where="args.config")
    return config


def class_of(config: PretrainedConfig, head: str | None, where: str) -> type[PreTrainedModel]:
    """Return the class of the model with that head; without one, the class that wrote the configuration.

    `head`: what follows `AutoModelFor`, such as `SequenceClassification`. Raises `TaskError` if there is no such class.
    """
    import transformers

    if head is None:
        named = (config.architectures or [""])[0]
        found = getattr(transformers, named, None)
        if found is None:
            raise TaskError(
                f"{CONFIG} names no architecture that Transformers has: {named or 'none'}",
                where=where,
                expected=f"args.head, one of {listed(heads_of(config))}",
            )
        return found  # type: ignore[no-any-return]
    auto = getattr(transformers, f"AutoModelFor{head}", None)
    try:
        classes = auto._model_mapping[type(config)]  # type: ignore[union-attr]  # noqa: SLF001
    except (AttributeError, KeyError, TypeError):
        heads = heads_of(config)
        raise TaskError(
            f"a model of type {config.model_type} has no head '{head}'",
            where="args.head",
            expected=f"one of {listed(heads)}" if heads else "a model that has heads",
        ) from None
    if not isinstance(classes, (tuple, list)):
        return classes  # type: ignore[no-any-return]
    # Some models have several; the configuration may name one.
    named = (one for one in classes if one.__name__ in (config.architectures or ()))
    return next(named, classes[0])  # type: ignore[no-any-return]


def heads_of(config: PretrainedConfig) -> list[str]:
    """Return the heads that models with this configuration can have."""
    from transformers.models.auto import modeling_auto

    found = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModelFor") and mapping is not None and type(config) in mapping:
            found.append(name.removeprefix("AutoModelFor"))
    return sorted(found)


def read_model(
    folder: Path,
    config: PretrainedConfig,
    cls: type[PreTrainedModel],
    where: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model with the weights in a folder, and the names of those that the folder lacks.

    Weights that it lacks have their initial values. Raises
    `TaskError` if weights have other shapes, or if the folder has hardly any of those of the model.
    """
    try:
        with quiet():
            model, report = cls.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        raise TaskError(
            f"{cls.__name__} cannot take the weights in {folder}: {first_line(error)}",
            where=where,
            expected="weights of the shapes that config.json and args.config give",
        ) from error
    lacking, names = set(report["missing_keys"]), [name for name, _ in model.named_parameters()]
    body = [name for name in names if name.startswith(f"{cls.base_model_prefix}.")] or names
    if 2 * len(lacking & set(body)) > len(body):
        other = sorted(report["unexpected_keys"])
        raise TaskError(
            f"{folder} holds weights of another model than {cls.__name__}, such as {listed(other or ['none'])}",
            where=where,
            expected=f"weights such as {listed(body)}",
        )
    return model, sorted(lacking)


def taken_by(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a model's forward pass."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]
