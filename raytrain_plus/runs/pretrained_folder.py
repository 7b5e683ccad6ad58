"""Write a model of Transformers, or an adapter of `peft`, as a folder that `from_pretrained` opens."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from raytrain_plus.errors import InputError

CONFIG = "config.json"
OTHERS = (
    "added_tokens.json",
    "chat_template*",
    "feature_extractor_config.json",
    "merges.txt",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "video_preprocessor_config.json",
    "vocab*",
)
"""The files of a tokenizer or a processor in such a folder."""


@runtime_checkable
class FromFolder(Protocol):
    """A task whose model comes from a folder, which has its tokenizer or processor, too."""

    folder: Path | None


def write_folder(model: Any, to: Path, beside: Iterable[Path]) -> None:
    """Write a model as a folder that `from_pretrained` opens, whole or not at all.

    An adapter is merged into its model, which is changed. `beside`: folders whose tokenizer or processor it gets; the
    first that has a file counts. Raises `InputError` if `to` exists, or cannot be written, or the model is none of
    Transformers', or its adapter cannot be merged.
    """
    save: Callable[..., Any] | None = getattr(model, "save_pretrained", None)
    if save is None or not hasattr(model, "config"):
        raise InputError(
            f"the model is a {type(model).__name__}, and only models of Transformers can be written as such a folder",
            where="--format transformers",
            remedy="--format safetensors",
        )
    if hasattr(model, "peft_config"):
        if not hasattr(model, "merge_and_unload"):
            raise InputError(
                f"the adapter of the model, a {type(model).__name__}, cannot be merged into it",
                where="--format transformers",
                remedy="--format adapter",
            )
        _untie(model.get_base_model())
        save = model.merge_and_unload().save_pretrained
    _write(save, to, beside)


def _untie(model: Any) -> None:
    """Give the head of a model weights of its own if it shares those of the embeddings, and one of them has an adapter.

    Else merging the adapter of one would change the other, too.
    """
    ends = [getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings")]
    if any(end is None for end in ends):
        return
    first, last = (getattr(end, "base_layer", end) for end in ends)
    if first.weight is last.weight and any(hasattr(end, "base_layer") for end in ends):
        last.weight = type(last.weight)(last.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def write_adapter(model: Any, to: Path, beside: Iterable[Path]) -> None:
    """Write the adapter of a model as a folder that `peft` opens, whole or not at all.

    `beside`: see `write_folder`. Raises `InputError` as that does, and for a model that has no adapter.
    """
    if not hasattr(model, "peft_config"):
        raise InputError(
            f"the model is a {type(model).__name__}, which has no adapter of peft",
            where="--format adapter",
            remedy="--format transformers",
        )
    _write(model.save_pretrained, to, beside)


def _write(save: Callable[..., Any], to: Path, beside: Iterable[Path]) -> None:
    if os.path.lexists(to):
        raise InputError("the folder exists", where=str(to), remedy="name a new one")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.part") as part:
            written = Path(part, "model")
            with quiet():
                save(written)
            for folder in beside:
                _copy_others(folder, written)
            # An adapter that has a name is in a folder of that name.
            mode = next(written.rglob(f"*{CONFIG}")).stat().st_mode
            for file in written.rglob("*"):
                # That of tensors only its owner may read.
                if file.is_file():
                    file.chmod(mode)
            os.rename(written, to)
    except (OSError, ValueError) as error:
        # Transformers refuses to write an invalid configuration.
        raise InputError(f"the folder cannot be written: {error}", where=str(to)) from None


def _copy_others(folder: Path, to: Path) -> None:
    for pattern in OTHERS:
        for file in folder.glob(pattern):
            if file.is_file() and not (to / file.name).exists():
                shutil.copyfile(file, to / file.name)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the tables and bars that Transformers prints when it reads and writes models."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
