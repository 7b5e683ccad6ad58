"""Export of a run's newest complete weights, into a file or a model."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from torch import nn

from raytrain_plus import Data, Job
from raytrain_plus.errors import CheckpointError, InputError
from raytrain_plus.runs.export import NEWEST, export_program, export_to, export_weights, load, rounded
from raytrain_plus.runs.status import status
from raytrain_plus.state.named import bytes_of, entry_of
from raytrain_plus.state.stored.checkpoint import commit
from raytrain_plus.state.stored.digest import model_file
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.storage.address import within
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.model.model import other_names
from raytrain_plus.training.model.rebuilt import weight_sha256
from tests.support.datasets import write
from tests.support.states import described, shares


class Model(nn.Module):
    """A model with a persistent buffer, one that is not persistent, and a tied weight."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = self.first
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def model(seed: int) -> Model:
    torch.manual_seed(seed)
    made = Model()
    made.count.fill_(seed)
    return made


def save(run: Folder, step: int, **changes: Any) -> None:
    """Write a checkpoint of `model(step)`."""
    of_step = model(step)
    tensors = {f"param/{name}": value.detach() for name, value in of_step.named_parameters()}
    tensors |= {f"buffer/{name}": value for name, value in of_step.named_buffers()}
    tensors["optim/first.weight/exp_avg"] = torch.ones(4, 3)
    written = shares(run, tensors, name_of(step, 0), 2)
    tree = {"persistent": ["count"], "shared": other_names(of_step)}
    commit(run, described(step, 0, written, tree=tree, **changes))


def file_of(run: LocalFolder, step: int) -> Path:
    return run.path / "checkpoints" / name_of(step, 0) / "00001-of-00002.safetensors"


@pytest.fixture
def local(tmp_path: Path) -> LocalFolder:
    run = LocalFolder(tmp_path / "run")
    for step in (4, 9):
        save(run, step)
    return run


def same(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_gets_the_newest_weights_of_a_run(run: Folder) -> None:
    for step in (4, 9):
        save(run, step)
    mine = model(0)
    assert load(run.address, mine) == 9
    assert same(mine, model(9))


def test_a_model_gets_the_weights_of_an_exported_file(local: LocalFolder, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    assert export_weights(local, to).step == 9
    mine = model(0)
    assert load(to, mine) == -1
    assert same(mine, model(9))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exported_file_has_every_name_of_a_tied_weight(local: LocalFolder, tmp_path: Path, dtype: str) -> None:
    """What a model ties is there under each name, as in its `state_dict`."""
    to, plain = tmp_path / "model.safetensors", model(0)
    export_weights(local, to, dtype=dtype)
    plain.load_state_dict(safetensors.torch.load_file(to), strict=True)
    assert plain.tied.weight is plain.first.weight
    expected = model(9).first.weight
    assert torch.equal(plain.first.weight, expected.bfloat16().float() if dtype == "bf16" else expected)


def test_a_checkpoint_of_an_older_version_names_a_tied_weight_once(local: LocalFolder, tmp_path: Path) -> None:
    tensors = {f"param/{name}": value.detach() for name, value in model(14).named_parameters()}
    tensors["buffer/count"] = torch.tensor(14.0)
    commit(local, described(14, 0, shares(local, tensors, name_of(14, 0), 1), tree={"persistent": ["count"]}))
    to = tmp_path / "model.safetensors"
    export_weights(local, to)
    assert set(safetensors.torch.load_file(to)) == {"first.weight", "first.bias", "count"}
    for source in (local.path, to):
        mine = model(0)
        load(source, mine)
        assert same(mine, model(14))


def test_a_model_must_have_the_frozen_weights_that_a_run_has_not_saved(tmp_path: Path) -> None:
    """Those of the same bytes; a file of the run's model says which these are, too."""
    trained, run = model(9), LocalFolder(tmp_path / "run")
    saved = {"param/first.bias": trained.first.bias.detach(), "buffer/count": trained.count}
    digest = weight_sha256(trained.first.weight)
    held = {**saved, "rebuilt/first.weight": torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)}
    commit(run, described(9, 0, shares(run, held, name_of(9, 0), 2), tree={"persistent": ["count"]}))
    file = tmp_path / "model.safetensors"
    begun = [[entry_of(name, value) for name, value in held.items()]]
    pieces = model_file(begun, lambda _, own: lambda: [bytes_of(held[one.name]).numpy() for one in own], sha256())
    file.write_bytes(b"".join(map(bytes, pieces)))
    assert set(safetensors.torch.load_file(file)) == {"first.bias", "count"}
    for source in (run.path, file):
        mine = model(9)
        with torch.no_grad():
            mine.first.bias.zero_()
        load(source, mine)
        assert same(mine, trained)
        other = model(0)
        with pytest.raises(InputError, match=r"the weight 'first\.weight' of the model is not the one") as found:
            load(source, other)
        assert digest[:16] in found.value.expected
        assert same(other, model(0))
        with pytest.raises(InputError, match=r"first\.weight is not in the model"):
            load(source, nn.Linear(2, 2))


def test_weights_are_rounded_to_bfloat16_and_buffers_are_not(local: LocalFolder, tmp_path: Path) -> None:
    to, whole = tmp_path / "half.safetensors", model(9)
    assert export_weights(local, to, dtype="bf16").step == 9
    found = safetensors.torch.load_file(to)
    for name in ("first.weight", "first.bias"):
        assert torch.equal(found[name], whole.state_dict()[name].to(torch.bfloat16))
    assert (found["count"].dtype, float(found["count"])) == (torch.float32, 9.0)
    mine = model(0)
    assert load(to, mine) == -1
    assert torch.equal(mine.first.weight, whole.first.weight.to(torch.bfloat16).float())


def test_a_file_of_other_dtypes_keeps_them() -> None:
    weights = {str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.int32)}
    found = rounded(weights, weights.keys())
    assert [value.dtype for value in found.values()] == [torch.bfloat16, torch.float16, torch.int32]


def test_a_program_has_the_dtypes_of_the_model(local: LocalFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--dtype bf16 cannot be combined with --format torch-export"):
        export_to(str(local.path), "runs", tmp_path / "model.pt2", "torch-export", NEWEST, "bf16")


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    local: LocalFolder, cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(local, 9)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[: len(content) - cut])
    mine = model(0)
    assert load(local.path, mine) == 4
    assert same(mine, model(4))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the checkpoint {name_of(9, 0)} cannot be used: ")
    assert "00001-of-00002.safetensors" in line


def test_an_incomplete_newest_checkpoint_is_skipped_with_a_warning(
    local: LocalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions called one complete of which a stage was missing."""
    part = {"param/first.weight": torch.ones(4, 3), "buffer/count": torch.zeros(())}
    written = shares(local, part, name_of(14, 1), 1)
    commit(local, described(14, 1, written, tree={"persistent": ["count"]}))
    assert export_weights(local, tmp_path / "model.safetensors").step == 9
    assert load(local.path, model(0)) == 9
    said = (
        f"warning: the checkpoint {name_of(14, 1)} cannot be used: incomplete: it lacks 1 of 2 parameters: first.bias"
    )
    assert capsys.readouterr().err.splitlines() == [said] * 2
    told = status(local).checkpoints
    assert [one.state for one in told] == ["incomplete: it lacks 1 of 2 parameters: first.bias", "complete", "complete"]
    with pytest.raises(InputError, match="incomplete: it lacks 1 of 2 parameters"):
        load(local.path, model(0), steps=15)


def test_a_newest_checkpoint_that_is_not_finite_is_skipped_with_a_warning(
    local: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions could write such a checkpoint."""
    bad = {"param/first.weight": torch.full((4, 3), torch.nan), "param/first.bias": torch.zeros(4)}
    bad["buffer/count"] = torch.zeros(())
    groups = [{"parameters": ["first.weight", "first.bias"], "settings": {}}]
    written = shares(local, bad, name_of(14, 0), 2)
    commit(local, described(14, 0, written, tree={"persistent": ["count"], "groups": groups}))
    assert load(local.path, model(0)) == 9
    assert "'first.weight' holds NaN or infinity" in capsys.readouterr().err


def test_a_checkpoint_of_a_newer_version_is_refused(local: LocalFolder, tmp_path: Path) -> None:
    document = local.path / "checkpoints" / f"{name_of(9, 0)}.json"
    rest = document.read_bytes().partition(b", ")[2].replace(b'"format": 1', b'"format": 2')
    document.write_bytes(b'{"xxh3_128": "' + xxhash.xxh3_128(rest).hexdigest().encode() + b'", ' + rest)
    for use in (lambda: load(local.path, model(0)), lambda: export_weights(local, tmp_path / "model.safetensors")):
        with pytest.raises(CheckpointError, match="the checkpoint has format 2, but this version reads format 1"):
            use()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_without_a_complete_checkpoint_is_refused_with_each_reason(local: LocalFolder) -> None:
    for step in (4, 9):
        file_of(local, step).unlink()
    with pytest.raises(InputError, match=r"no complete checkpoint; 0+9-0+: 00001.* missing; 0+4-0+: 00001.* missing"):
        load(local.path, model(0))
    (local.path / "nothing").mkdir()
    with pytest.raises(InputError, match="no complete checkpoint"):
        load(local.path / "nothing", model(0))


def test_a_run_is_found_by_its_name(local: LocalFolder) -> None:
    local.write("job.yaml", [b"{}"])
    mine, storage = model(0), str(local.path.parent)
    assert load(local.path.name, mine, storage=storage) == 9
    assert same(mine, model(9))
    with pytest.raises(InputError, match="there is no run 'runn'") as caught:
        load("runn", mine, storage=storage)
    assert caught.value.remedy == "did you mean run?"


def test_another_models_weights_change_nothing(local: LocalFolder) -> None:
    other = nn.ModuleDict({"first": nn.Linear(3, 5), "last": nn.Linear(2, 2)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(InputError, match=r"do not match the model: count is not in the model; last\.bias is only"):
        load(local.path, other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_an_invalid_safetensors_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a pickle, say")
    with pytest.raises(InputError, match=r"model\.safetensors: not a valid safetensors file"):
        load(tmp_path / "model.safetensors", model(0))


def test_an_export_that_cannot_be_written_is_reported(local: LocalFolder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        export_weights(local, tmp_path / "file" / "model.safetensors")


def test_an_exported_file_has_the_mode_of_any_new_file_in_a_folder_that_is_made(
    local: LocalFolder, tmp_path: Path
) -> None:
    to = tmp_path / "out" / "deep" / "model.safetensors"
    export_weights(local, to)
    (tmp_path / "plain").touch()
    assert to.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert [path.name for path in to.parent.iterdir()] == ["model.safetensors"]


def test_a_checkpoint_is_chosen_by_its_step_its_folder_or_as_the_best(run: Folder) -> None:
    judged = {"checkpoint": {"keep_best": {"metric": "loss", "mode": "max"}}}
    for step, loss in ((4, 0.5), (9, 2.0), (14, 1.0)):
        save(run, step, job=judged, metrics={"loss": loss})

    def loaded(path: str, **which: Any) -> int:
        mine = model(0)
        made = load(path, mine, **which)
        assert same(mine, model(made))
        return made

    assert (loaded(run.address), loaded(run.address, steps=5), loaded(run.address, best=True)) == (14, 4, 9)
    folder = within(within(run.address, "checkpoints"), name_of(4, 0))
    assert (loaded(folder), loaded(within(within(run.address, "checkpoints"), f"{name_of(9, 0)}.json"))) == (4, 9)
    with pytest.raises(InputError, match="no checkpoint after step 7") as caught:
        loaded(run.address, steps=7)
    assert caught.value.expected == "one of those after step 15, 10, 5"
    for which in ({"steps": 5}, {"best": True}):
        with pytest.raises(InputError, match="more than one checkpoint is chosen"):
            loaded(folder, **which)
    save(run, 19)
    with pytest.raises(InputError, match="no checkpoint is known to be the best") as caught:
        loaded(run.address, best=True)
    assert "keep_best" in caught.value.expected


def test_a_chosen_checkpoint_that_is_damaged_is_not_replaced_by_another(
    local: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(local, 9).write_bytes(b"")
    with pytest.raises(InputError, match=r"the checkpoint cannot be used; 0+9-0+: 00001-of.* has 0 bytes"):
        load(local.path, model(0), steps=10)
    file_of(local, 4).write_bytes(bytes(file_of(local, 4).stat().st_size))
    with pytest.raises(InputError, match=r"the checkpoint cannot be used; 0+4-0+: .* is damaged"):
        load(local.path / "checkpoints" / name_of(4, 0), model(0))
    shares(local, {"param/first.bias": torch.zeros(4)}, name_of(14, 0), 1)
    with pytest.raises(InputError, match=r"the checkpoint cannot be used; 0+14-0+: not finished: there is no manifest"):
        load(local.path, model(0), steps=15)
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match="a safetensors file has no checkpoints"):
        load(file_of(local, 4), model(0), best=True)


def test_checkpoints_are_chosen_by_the_number_of_steps_made(local: LocalFolder) -> None:
    """People read `after step 10` in `raytrain status`, and type what they read."""
    mine = model(0)
    with pytest.raises(InputError, match=r"`step` is not an argument of load; `steps` counts steps made") as caught:
        load(local.path, mine, step=9)
    assert caught.value.remedy == (
        "steps=10 for what events and callbacks call step 9, steps=9 for what `raytrain status` calls step 9"
    )
    for steps in (0, -1):
        with pytest.raises(InputError, match=f"steps={steps}: no checkpoint is older than the first step"):
            load(local.path, mine, steps=steps)
    assert same(mine, model(0))


TASKS = """
import torch
from torch import nn
from torch.nn import functional as F
from raytrain_plus import Task


class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else super().forward(-x)


class Branches(Task):
    def model(self):
        return Model(1, 1)

    def collate(self, table):
        return torch.ones(table.num_rows, 1)

    def loss(self, model, batch):
        return model(batch).sum()


class Inside(Branches):
    def loss(self, model, batch):
        return (batch * model.weight).sum()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(8, 4), nn.Embedding(16, 4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 8)

    def forward(self, ids, labels=None):
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        scores = self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        return scores if labels is None else F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Labelled(Task):
    def model(self):
        return Decoder()

    def collate(self, table):
        ids = torch.arange(table.num_rows * 12).view(-1, 12) % 8
        return {"ids": ids, "labels": ids.roll(-1, 1)}

    def loss(self, model, batch):
        return model(batch["ids"], labels=batch["labels"])


class Inputs(Labelled):
    def example(self, batch):
        return (batch["ids"],)


class Named(Labelled):
    def example(self, batch):
        return {"ids": batch["ids"]}


class Own(Labelled):
    def __init__(self):
        self.example = "its own"


class Bare(Labelled):
    def example(self, batch):
        return batch["ids"]
"""


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Inside", "the task never calls its model as a whole"),
        pytest.param("Branches", "torch.export failed for this model: ", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_torch_cannot_export_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, words: str
) -> None:
    run = run_of(tmp_path, monkeypatch, task, {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
    with pytest.raises(InputError, match=words) as caught:
        export_program(run, tmp_path / "model.pt2", [tmp_path])
    assert caught.value.remedy.endswith("--format safetensors")
    assert caught.value.where == f"task: exported_tasks:{task}"
    assert not list(tmp_path.glob("*model*"))


def run_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, weights: dict[str, torch.Tensor], batch_size: int = 8
) -> LocalFolder:
    """Return a run of a task of `TASKS` whose checkpoint has these weights."""
    write(tmp_path / "data" / "0.parquet", 16)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "exported_tasks.py").write_text(TASKS)
    run = LocalFolder(tmp_path / "run")
    data = Data(path=str(tmp_path / "data"), batch_size=batch_size, shards=1)
    job = Job(name="run", task=f"exported_tasks:{task}", data=data, steps=2, storage=str(tmp_path))
    run.write("job.yaml", [job.to_yaml().encode()])
    tensors = {f"param/{name}": value for name, value in weights.items()}
    commit(run, described(1, 0, shares(run, tensors, name_of(1, 0), 1), tree={"persistent": []}))
    return run


DECODER = {
    "token.weight": torch.ones(8, 4),
    "place.weight": torch.ones(16, 4),
    "qkv.weight": torch.ones(12, 4),
    "qkv.bias": torch.ones(12),
    "out.weight": torch.ones(8, 4),
    "out.bias": torch.ones(8),
}


@pytest.mark.parametrize("batch_size", [8, 1])
def test_a_program_takes_what_the_example_says_of_any_rows_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Without the labels that the loss needs."""
    run = run_of(tmp_path, monkeypatch, "Inputs", DECODER, batch_size)
    monkeypatch.chdir(tmp_path)
    said = export_to(str(run.path), "runs", tmp_path / "model.pt2", "torch-export", NEWEST)
    assert said.endswith("run; it takes ids: int64 (n, m); m at most 16"), said
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 8)


def test_a_program_without_an_example_takes_what_the_loss_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, monkeypatch, "Labelled", DECODER)
    _, takes = export_program(run, tmp_path / "model.pt2", [tmp_path])
    assert takes == "ids: int64 (n, m), labels: int64 (n, m); m at most 16"
    # An attribute of that name is none of our business.
    own = run_of(tmp_path / "own", monkeypatch, "Own", DECODER)
    assert export_program(own, tmp_path / "model.pt2", [tmp_path])[1] == takes
    _, takes = export_program(
        run_of(tmp_path / "named", monkeypatch, "Named", DECODER), tmp_path / "model.pt2", [tmp_path]
    )
    assert takes == "ids: int64 (n, m); m at most 16"


def test_an_example_that_is_neither_a_tuple_nor_a_dict_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, monkeypatch, "Bare", DECODER)
    with pytest.raises(InputError, match=r"Bare\.example returned Tensor") as caught:
        export_program(run, tmp_path / "model.pt2", [tmp_path])
    assert "a tuple of the model's positional arguments" in caught.value.expected
