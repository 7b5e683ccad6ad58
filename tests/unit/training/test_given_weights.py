"""Initial values from files: each weight gets the tensor of its name, and a worker reads its own alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from raytrain_plus import Task, WeightFiles
from raytrain_plus.errors import TaskError
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.task import Task as AnyTask
from raytrain_plus.training.model import opened_weights
from raytrain_plus.training.model.given_weights import (
    WantedTensor,
    given_weights,
    name_in_files,
    tensors_read,
    text_of_stars,
)
from raytrain_plus.training.model.model import (
    build_chunks,
    build_layers,
    build_model,
    model_to_load,
    model_without_values,
)

CPU = torch.device("cpu")
SEED = 5
WORDS, WIDTH = 12, 8
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(self.up(x)))
        return found


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.tokens(ids))
        return found


class Layered(Task):
    """A model in layers, with tied weights; `files` are its initial values."""

    def __init__(self, files: WeightFiles | None = None) -> None:
        self.files = files

    def layers(self) -> Mapping[str, Callable[[], nn.Module]] | None:
        return {
            "embed": Embed,
            "block0": Block,
            "block1": Block,
            "head": lambda: nn.Linear(WIDTH, WORDS, bias=False),
        }

    def tied(self) -> Mapping[str, str]:
        return {"head.weight": "embed.tokens.weight"}

    def tensor(self) -> Mapping[str, str]:
        return {"embed.tokens": "vocab", "block*.down": "rowwise", "block*.up": "colwise", "head": "colwise"}

    def weights(self) -> WeightFiles | None:
        return self.files


class Plain(Layered):
    """The same without norms, so that it can be cut."""

    def layers(self) -> Mapping[str, Callable[[], nn.Module]] | None:
        def block() -> nn.Module:
            made = Block()
            made.norm = nn.Identity()  # type: ignore[assignment]
            return made

        return {**(super().layers() or {}), "block0": block, "block1": block}


class Net(nn.Module):
    """A model that is no sequence, with a weight that two of its modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = Embed(), Block()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.tokens.weight


class InOne(Layered):
    def layers(self) -> None:
        return None

    def model(self) -> nn.Module:
        return Net()


def values_of(task: AnyTask) -> Values:
    """Return values for all of a model's tensors; no two are alike."""
    draw = torch.Generator().manual_seed(1)
    saved = model_to_load(task, SEED).state_dict()
    return {
        name: torch.randn(value.shape, generator=draw) if value.is_floating_point() else torch.full(value.shape, 7)
        for name, value in saved.items()
    }


def safetensors_file(values: Values, to: Path) -> Path:
    save_file({name: value.clone() for name, value in values.items()}, to / "base.safetensors")
    return to / "base.safetensors"


def safetensors_folder(values: Values, to: Path) -> Path:
    safetensors_file(values, to).rename(to / "model.safetensors")
    return to


def folder_of_parts(values: Values, to: Path) -> Path:
    parts: dict[str, Values] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, value) in enumerate(values.items()):
        parts[list(parts)[number % 2]][name] = value.clone()
    for file, own in parts.items():
        save_file(own, to / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return to


def torch_file(values: Values, to: Path) -> Path:
    torch.save(values, to / "base.pt")
    return to / "base.pt"


KINDS = (safetensors_file, safetensors_folder, folder_of_parts, torch_file)


def same(module: nn.Module, values: Values) -> bool:
    saved = module.state_dict()
    return saved.keys() == values.keys() and all(torch.equal(value, values[name]) for name, value in saved.items())


def fault(task: AnyTask) -> TaskError:
    """Return the error of a build, after checking that the check before a run finds the same."""
    with pytest.raises(TaskError) as built:
        build_model(task, SEED, CPU)
    with pytest.raises(TaskError) as found:
        checked(task)
    assert str(found.value) == str(built.value)
    return built.value


def checked(task: AnyTask) -> str:
    given, model = given_weights(task), model_without_values(task)
    assert given is not None
    assert model is not None
    return given.check(model, {} if task.layers() is None else task.tied())


@contextmanager
def reading(patched: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the names of the tensors that are read."""
    read: list[str] = []

    class Noting:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.file = safe_open(*args, **settings)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            found: torch.Tensor = self.file.get_tensor(name)
            return found

    with patched.context() as at:
        at.setattr(opened_weights, "safe_open", Noting)
        yield read


def test_a_star_stands_for_any_text_and_as_little_as_fits() -> None:
    assert text_of_stars("block*.*", "block0.up.weight") == ("0", "up.weight")
    assert text_of_stars("head", "head.weight") is None
    assert text_of_stars("h[0]", "h0") is None
    assert text_of_stars("h.0", "hx0") is None


def test_the_first_pattern_that_fits_gives_the_name_in_the_files() -> None:
    names = {"block*.up.*": "h.*.fc.*", "*": "body.*"}
    assert name_in_files("block1.up.bias", names) == "h.1.fc.bias"
    assert name_in_files("head.bias", names) == "body.head.bias"
    assert name_in_files("head.bias", {}) == "head.bias"


def test_a_weight_is_read_under_any_of_its_names_that_is_not_new() -> None:
    shared, buffer = WantedTensor(("a", "b")), WantedTensor(("mean",), needed=False)
    assert tensors_read([shared, buffer], WeightFiles("x"), {"b"}) == ({"a": "b"}, [])
    assert tensors_read([shared, buffer], WeightFiles("x"), {"a", "b", "mean"}) == ({"a": "a", "mean": "mean"}, [])
    assert tensors_read([shared, buffer], WeightFiles("x"), {"c"}) == ({}, ["a"])
    assert tensors_read([shared], WeightFiles("x", new=["a"]), {"a", "b"}) == ({"a": "b"}, [])
    assert tensors_read([shared], WeightFiles("x", new=["*"]), {"a", "b"}) == ({}, [])


@pytest.mark.parametrize("task", [Layered, InOne])
@pytest.mark.parametrize("write", KINDS)
def test_a_model_has_the_values_of_each_kind_of_file(
    tmp_path: Path, write: Callable[[Values, Path], Path], task: type[Layered]
) -> None:
    values = values_of(task())
    made = task(WeightFiles(write(values, tmp_path)))
    assert checked(made) == ""
    model = build_model(made, SEED, CPU).module
    if task is Layered:
        values["head.weight"] = values["embed.tokens.weight"]
    else:
        values["embed.tokens.weight"] = values["head.weight"] = values["embed.tokens.weight"]
    assert same(model, values)
    assert not same(model_to_load(made, SEED), values), "a model to load reads no files"


def test_names_are_mapped_and_what_is_new_is_drawn_as_ever(tmp_path: Path) -> None:
    values = values_of(Layered())
    del values["head.weight"]
    renamed = {f"gpt.{name.replace('block', 'h.')}": value for name, value in values.items() if "block1" not in name}
    file = safetensors_file(renamed, tmp_path)
    names = {"block*": "gpt.h.*", "*": "gpt.*"}
    model = build_model(Layered(WeightFiles(file, names, new=["block1.*"])), SEED, CPU).module
    drawn = build_model(Layered(), SEED, CPU).module.state_dict()
    for name, value in model.state_dict().items():
        # A copy has the values of its owner.
        expected = drawn if name.startswith("block1") else {**values, "head.weight": values["embed.tokens.weight"]}
        assert torch.equal(value, expected[name]), name


def test_a_new_weight_is_drawn_also_if_the_files_have_it_in_another_shape(tmp_path: Path) -> None:
    values = values_of(InOne())
    values["head.bias"] = torch.zeros(WORDS + 1)
    made = InOne(WeightFiles(safetensors_file(values, tmp_path), new=["head.bias"]))
    assert "1 tensor that the model does not take: head.bias" in checked(made)
    assert torch.equal(build_model(made, SEED, CPU).module.head.bias, build_model(InOne(), SEED, CPU).module.head.bias)


def test_values_do_not_depend_on_the_seed_unless_they_are_new(tmp_path: Path) -> None:
    made = Layered(WeightFiles(safetensors_file(values_of(Layered()), tmp_path), new=["block1.up.*"]))
    one, other = (build_model(made, seed, CPU).module.state_dict() for seed in (1, 2))
    differ = {name for name, value in one.items() if not torch.equal(value, other[name])}
    assert differ == {"block1.up.weight", "block1.up.bias"}


def test_a_stage_reads_the_tensors_of_its_layers_and_the_owners_of_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(Layered())
    made = Layered(WeightFiles(folder_of_parts(values, tmp_path)))
    whole = build_model(made, SEED, CPU).module.state_dict()
    with reading(monkeypatch) as read:
        [first] = build_chunks(made, SEED, CPU, [["embed", "block0"]])
    assert sorted(read) == sorted(name for name in values if name.startswith(("embed", "block0")))
    with reading(monkeypatch) as read:
        [last] = build_chunks(made, SEED, CPU, [["block1", "head"]])
    assert sorted(read) == sorted(["embed.tokens.weight", *(name for name in values if name.startswith("block1"))])
    for stage in (first, last):
        for name, value in stage.module.state_dict().items():
            assert torch.equal(value, whole[name]), name
    with reading(monkeypatch) as read:
        before = []
        for built in build_layers(made, SEED, CPU):
            assert {name.partition(".")[0] for name in read[len(before) :]} <= {*built.layers, "embed"}
            before = list(read)
    assert set(read) == values.keys() - {"head.weight"}


def test_the_check_before_a_run_reads_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(Layered())
    made = Layered(WeightFiles(safetensors_file(values, tmp_path)))
    given, model = given_weights(made), model_without_values(made)
    monkeypatch.setattr(opened_weights.SafetensorsWeights, "tensors", None)
    assert given is not None
    assert model is not None
    assert given.check(model, made.tied()) == ""


@pytest.mark.parametrize("name", ["embed.tokens.weight", "head.weight"])
def test_tied_weights_are_read_once_under_any_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for task in (Layered, InOne):
        values = values_of(task())
        other = {"embed.tokens.weight", "head.weight"} - {name}
        kept = {key: value for key, value in values.items() if key not in other}
        made = task(WeightFiles(safetensors_file(kept, tmp_path)))
        assert checked(made) == ""
        with reading(monkeypatch) as read:
            model = build_model(made, SEED, CPU).module
        assert read.count(name) == 1
        assert torch.equal(model.embed.tokens.weight, values[name])
        assert torch.equal(model.head.weight, values[name])
    [last] = build_chunks(Layered(WeightFiles(safetensors_file(values_of(Layered()), tmp_path))), SEED, CPU, [["head"]])
    assert torch.equal(last.module.get_parameter("head.weight"), values_of(Layered())["embed.tokens.weight"])


def test_slices_are_cut_from_the_values_of_the_files(tmp_path: Path) -> None:
    values = values_of(Plain())
    made = Plain(WeightFiles(safetensors_file(values, tmp_path)))
    cut = build_model(made, SEED, CPU, Slicing(made.tensor(), 2)).module
    assert torch.equal(cut.get_parameter("block0@1.up.weight"), values["block0.up.weight"][8:])
    assert torch.equal(cut.get_parameter("block1@0.down.weight"), values["block1.down.weight"][:, :8])
    assert torch.equal(cut.get_parameter("head@1.weight"), values["embed.tokens.weight"][WORDS // 2 :])


def test_values_get_the_dtype_of_their_parameter(tmp_path: Path) -> None:
    values = {name: value.bfloat16() for name, value in values_of(InOne()).items()}
    model = build_model(InOne(WeightFiles(safetensors_file(values, tmp_path))), SEED, CPU).module
    assert model.embed.tokens.weight.dtype is torch.float32
    assert torch.equal(model.embed.tokens.weight, values["embed.tokens.weight"].float())
    assert model.body.norm.num_batches_tracked.dtype is torch.int64
    assert model.body.norm.num_batches_tracked == 7
    assert model.embed.tokens.weight.requires_grad


def test_buffers_that_the_files_lack_keep_their_values(tmp_path: Path) -> None:
    values = {name: value for name, value in values_of(InOne()).items() if "running" not in name}
    made = InOne(WeightFiles(safetensors_file(values, tmp_path)))
    assert checked(made) == ""
    model = build_model(made, SEED, CPU).module
    assert model.body.norm.running_var.eq(1).all()
    assert model.body.norm.num_batches_tracked == 7


def test_buffers_that_are_not_persistent_are_not_read(tmp_path: Path) -> None:
    class Masked(InOne):
        def model(self) -> nn.Module:
            model = Net()
            model.register_buffer("mask", torch.ones(2), persistent=False)
            return model

    values = values_of(InOne()) | {"mask": torch.zeros(2)}
    made = Masked(WeightFiles(file := safetensors_file(values, tmp_path)))
    assert checked(made) == f"{file} holds 1 tensor that the model does not take: mask"
    assert build_model(made, SEED, CPU).module.mask.eq(1).all()


def test_tensors_that_nothing_takes_are_counted(tmp_path: Path) -> None:
    values = values_of(Layered()) | {f"old.{number}": torch.zeros(1) for number in range(5)}
    made = Layered(WeightFiles(file := safetensors_file(values, tmp_path)))
    assert checked(made) == f"{file} holds 5 tensors that the model does not take: old.0, old.1, old.2, ..."


def test_weights_that_the_files_lack_are_an_error(tmp_path: Path) -> None:
    values = {name: value for name, value in values_of(Layered()).items() if "up" not in name}
    error = fault(Layered(WeightFiles(file := safetensors_file(values, tmp_path), {"block0.*": "h.*"}, ["block1.*"])))
    assert error.what.startswith(f"{file} has no values for ")
    assert error.what.endswith(" of the model's weights: block0.up.weight, block0.up.bias, block0.norm.weight, ...")
    assert error.where == "Task.weights"
    assert error.expected.startswith("a tensor 'h.up.weight'; the files have block0.")
    assert "`new`" in error.remedy


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    values = values_of(InOne())
    values["wide"] = torch.zeros(17, WIDTH)
    error = fault(InOne(WeightFiles(file := safetensors_file(values, tmp_path), {"body.up.weight": "wide"})))
    assert (
        error.what == f"'body.up.weight' has the shape [16, 8] in the model, and [17, 8] in {file}, where it is 'wide'"
    )
    # A tensor of one value would be copied into all of them.
    values["body.up.bias"] = torch.zeros(1)
    del values["wide"]
    assert (
        "'body.up.bias' has the shape [16] in the model, and [1] in"
        in fault(InOne(WeightFiles(safetensors_file(values, tmp_path)))).what
    )


@pytest.mark.parametrize(("setting", "value"), [("new", ["heads.*"]), ("names", {"heads.*": "head.*"})])
def test_a_pattern_that_fits_nothing_is_an_error(tmp_path: Path, setting: str, value: Any) -> None:
    file = safetensors_file(values_of(InOne()), tmp_path)
    with pytest.raises(TaskError, match=r"no weight of the model fits 'heads\.\*'") as found:
        checked(InOne(WeightFiles(file, **{setting: value})))
    assert found.value.where == f"Task.weights: {setting}"


def test_files_that_are_described_wrongly_are_an_error(tmp_path: Path) -> None:
    file = safetensors_file(values_of(InOne()), tmp_path)
    assert "`names` maps 'a.*' to 'b'" in fault(InOne(WeightFiles(file, {"a.*": "b"}))).what
    assert fault(InOne(WeightFiles(file, new="head.*"))).expected == "a list: ['head.*']"
    assert "weights() returned str" in fault(InOne(str(file))).what  # type: ignore[arg-type]
    made = InOne()
    made.weights = torch.ones(3)  # type: ignore[assignment, method-assign]
    assert "hides the method weights()" in fault(made).what


def test_files_that_are_not_there_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = fault(InOne(WeightFiles("base.safetensors")))
    assert error.what == "there is no file or folder base.safetensors"
    assert str(tmp_path) in error.remedy
    assert fault(InOne(WeightFiles(tmp_path / "none"))).remedy == ""
    assert "has no model.safetensors" in fault(InOne(WeightFiles(tmp_path))).what
    folder_of_parts(values_of(InOne()), tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors, which model.safetensors.index.json names" in fault(InOne(WeightFiles(tmp_path))).what
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is not an index of safetensors files" in fault(InOne(WeightFiles(tmp_path))).what


def test_files_that_hold_something_else_are_an_error(tmp_path: Path) -> None:
    class Pickled:
        """Nothing that is opened."""

    broken, pickled, nested, old = (tmp_path / name for name in ("a.safetensors", "b.pt", "c.pt", "d.pt"))
    broken.write_bytes(b"none")
    assert f"{broken} cannot be read" in fault(InOne(WeightFiles(broken))).what
    torch.save({"x": nn.Linear(2, 2)}, pickled)
    torch.save({"state_dict": values_of(InOne())}, nested)
    torch.save(values_of(InOne()), old, _use_new_zipfile_serialization=False)
    for file in (pickled, nested, old):
        error = fault(InOne(WeightFiles(file)))
        assert error.what.startswith(f"{file} is not a torch file that holds tensors by name")
        assert "save model.state_dict() with safetensors" in error.remedy


def test_an_index_that_names_a_tensor_which_its_file_lacks_is_an_error(tmp_path: Path) -> None:
    folder_of_parts(values_of(InOne()), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    part = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[
        named["weight_map"]["embed.tokens.weight"]
    ]
    named["weight_map"]["embed.tokens.weight"] = part
    index.write_text(json.dumps(named))
    assert f"{tmp_path / part} cannot be read" in fault(InOne(WeightFiles(tmp_path))).what
