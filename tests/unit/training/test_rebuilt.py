"""Frozen weights that each worker builds by itself: a digest stands for them in the state, and others are noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raytrain_plus import Data, Job, Task, WeightFiles
from raytrain_plus.errors import TaskError
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.state.holding import listed_weights, model_state
from raytrain_plus.state.named import state_sha256
from raytrain_plus.state.stored.manifest import StoredTensor, mismatch
from raytrain_plus.state.transfer import hashed, part_of, restricted
from raytrain_plus.training.model.model import Built, build_chunks, build_model, model_to_load
from raytrain_plus.training.model.rebuilt import weight_sha256
from raytrain_plus.training.model.weights_check import check_files
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.trial.state_size import count_state
from raytrain_plus.workers.states.state_source import sha256_of

CPU, SEED, WIDTH = torch.device("cpu"), 5, 8


def backbone() -> nn.Module:
    made = nn.Sequential()
    for name, width, to in (("up", WIDTH, 16), ("down", 16, WIDTH)):
        made.add_module(name, nn.Linear(width, to, bias=name == "up"))
    return made.requires_grad_(False)


class Tuned(Task):
    """A frozen backbone from a file, under a head that is trained."""

    def __init__(self, file: str, saved: bool = False, patterns: Sequence[str] = ("backbone.*",)) -> None:
        self.file, self.patterns = file, () if saved else patterns

    def layers(self) -> Mapping[str, Callable[[], nn.Module]] | None:
        return {"backbone": backbone, "head": lambda: nn.Linear(WIDTH, 3)}

    def tensor(self) -> Mapping[str, str]:
        return {"backbone.up": "colwise", "backbone.down": "rowwise"}

    def weights(self) -> WeightFiles | None:
        return WeightFiles(self.file, new=["head.*"])

    def rebuilt(self) -> Sequence[str]:
        return self.patterns

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()


class Whole(Tuned):
    """The same as one module."""

    def layers(self) -> None:
        return None

    def model(self) -> nn.Module:
        made = nn.Module()
        made.add_module("backbone", backbone())
        made.add_module("head", nn.Linear(WIDTH, 3))
        return made


def file_of(folder: Path, seed: int = 1) -> str:
    draw = torch.Generator().manual_seed(seed)
    values = {f"backbone.{name}": torch.randn(one.shape, generator=draw) for name, one in backbone().named_parameters()}
    save_file(values, folder / f"{seed}.safetensors")
    return str(folder / f"{seed}.safetensors")


def state(task: Task, *built: Built) -> TrainState:
    return TrainState(task, built or (build_model(task, SEED, CPU),), Summing(2), seed=SEED)


FROZEN = ["backbone.down.weight", "backbone.up.bias", "backbone.up.weight"]


@pytest.mark.parametrize("kind", [Tuned, Whole])
def test_a_digest_stands_for_what_each_worker_builds(tmp_path: Path, kind: type[Tuned]) -> None:
    one = state(kind(file_of(tmp_path)))
    tensors = {str(key): value for key, value in model_state(one.holding()).items()}
    assert sorted(tensors) == sorted(["param/head.bias", "param/head.weight", *(f"rebuilt/{name}" for name in FROZEN)])
    value = one.module.get_parameter("backbone.up.weight").detach()
    expected = hashlib.sha256(b"float32\x0016,8\x00" + value.numpy().tobytes()).digest()
    assert tensors["rebuilt/backbone.up.weight"].numpy().tobytes() == expected
    assert listed_weights(one.holding()).keys() == {"head.bias", "head.weight"}
    assert one.snapshot().bytes == 3 * 32 + (WIDTH * 3 + 3) * 4
    saved = state(kind(file_of(tmp_path), saved=True))
    assert {"param/" + name for name in FROZEN} <= model_state(saved.holding()).keys()


def test_the_hash_of_a_state_says_which_frozen_weights_it_has(tmp_path: Path) -> None:
    one, same, other = (state(Tuned(file_of(tmp_path, seed))) for seed in (1, 1, 2))
    assert sha256_of(one) == sha256_of(same) == state_sha256(hashed(one.snapshot()))
    assert sha256_of(one) != sha256_of(other)
    assert torch.equal(one.module.get_parameter("head.weight"), other.module.get_parameter("head.weight"))


def test_a_state_goes_only_where_the_same_frozen_weights_are(tmp_path: Path) -> None:
    one, same, other = (state(Tuned(file_of(tmp_path, seed))) for seed in (1, 1, 2))
    with torch.no_grad():
        one.module.get_parameter("head.weight").add_(1)
    same.adopt(one.snapshot())
    assert torch.equal(same.module.get_parameter("head.weight"), one.module.get_parameter("head.weight"))
    before = other.module.get_parameter("head.weight").detach().clone()
    with pytest.raises(TaskError, match=r"the frozen weight 'backbone\.[a-z.]*' has other values") as found:
        other.adopt(one.snapshot())
    assert "put back the files" in found.value.remedy
    assert torch.equal(other.module.get_parameter("head.weight"), before)


def test_stages_together_have_the_state_of_the_whole(tmp_path: Path) -> None:
    task = Tuned(file_of(tmp_path))
    whole = state(task)
    parts = [state(task, *build_chunks(task, SEED, CPU, [[name]])).snapshot() for name in ("backbone", "head")]
    assert sum(part.bytes for part in parts) == whole.snapshot().bytes
    assert state_sha256(hashed(restricted(parts, ["other"]))) == sha256_of(whole)
    assert [*part_of(whole.snapshot(), {"backbone"}.__contains__).tensors] == [*parts[0].tensors]


def test_slices_have_the_digest_of_the_whole_weight(tmp_path: Path) -> None:
    task = Tuned(file_of(tmp_path))
    whole = build_model(task, SEED, CPU)
    cut = state(task, build_model(task, SEED, CPU, Slicing(task.tensor(), 2)))
    digests = {name: value.numpy().tobytes().hex() for name, value in cut.holding().rebuilt.items()}
    expected = weight_sha256(whole.module.get_parameter("backbone.up.weight"))
    assert digests["backbone@0.up.weight"] == digests["backbone@1.up.weight"] == expected
    assert digests["backbone@1.down.weight"] == whole.rebuilt["backbone.down.weight"]
    assert not [key for key in model_state(cut.holding()) if str(key).startswith("param/backbone")]


def test_trained_weights_are_saved_even_if_a_pattern_fits_them(tmp_path: Path) -> None:
    one = state(Tuned(file_of(tmp_path), patterns=["*"]))
    assert {"param/head.weight", "param/head.bias"} <= model_state(one.holding()).keys()


def test_a_checkpoint_says_which_weights_it_lacks(tmp_path: Path) -> None:
    stored = {"param/a.w": StoredTensor("float32", (2,), ()), "rebuilt/b.w": StoredTensor("uint8", (32,), ())}
    assert mismatch(stored, {"param/a.w": ("float32", (2,)), "rebuilt/b.w": ("uint8", (32,))}) == []
    assert mismatch(stored, {"rebuilt/a.w": ("uint8", (32,)), "param/b.w": ("float32", (2,))}) == [
        "a.w is saved in the checkpoint, and Task.rebuilt names it",
        "b.w is not saved in the checkpoint, and Task.rebuilt does not name it",
    ]


def job(task: type[Task], **args: Any) -> Job:
    return Job(name="x", task=task, args=args, data=Data(path="x", batch_size=2, shards=1), steps=1)


def test_a_pattern_that_fits_no_frozen_weight_is_an_error(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert check_files(job(Tuned, file=file), Tuned) == ""
    for pattern in ("body.*", "head.*"):
        with pytest.raises(TaskError, match=f"'{pattern[:4]}.*' fits no frozen weight") as found:
            check_files(job(Tuned, file=file, patterns=[pattern]), Tuned)
        assert "backbone.up.weight" in found.value.expected
    with pytest.raises(TaskError, match="no list of patterns"):
        check_files(job(Tuned, file=file, patterns="backbone.*"), Tuned)


def test_the_size_of_what_is_saved_has_no_frozen_weights(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    sizes = [count_state(job(Tuned, file=file), Tuned(file, saved=saved)) for saved in (True, False)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    frozen = sum(value.nbytes for value in backbone().parameters())
    assert sizes[0].saved - sizes[1].saved == frozen == sizes[1].frozen


def test_a_model_to_load_reads_the_files_of_what_is_not_saved(tmp_path: Path) -> None:
    task = Tuned(file_of(tmp_path))
    built = build_model(task, SEED, CPU).module
    for saved in (False, True):
        loaded = model_to_load(Tuned(task.file, saved=saved), SEED)
        same = torch.equal(loaded.get_parameter("backbone.up.weight"), built.get_parameter("backbone.up.weight"))
        assert same is not saved
