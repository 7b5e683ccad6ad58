"""Checkpoints are atomic wherever the writer stops, and every byte is verified before use."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.state.stored import manifest as m
from raytrain_plus.state.stored.checkpoint import commit, read_tensors, survey, sweep
from raytrain_plus.state.transfer import unpacked
from raytrain_plus.storage.folders.local import Disk, LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.support.states import Tensors, described, load, same, save, shares, state
from tests.unit.storage.disk import Full, after_every_stop


@pytest.mark.parametrize("writers", [1, 2, 3, 8])
def test_a_checkpoint_of_any_number_of_writers_is_read_back(
    tmp_path: Path, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain_plus.state.stored.shares.LEAST_BYTES", 50)
    run = LocalFolder(tmp_path)
    save(run, 7, writers=writers)
    step, read = load(run)
    assert step == 7
    assert same(read, state(7))


def test_rows_of_a_tensor_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_plus.state.stored.shares.LEAST_BYTES", 50)
    run = LocalFolder(tmp_path)
    made = save(run, 1, writers=2)
    tensor = made.tensors["param/first.weight"]
    assert [(piece.first, piece.last) for piece in tensor.pieces] == [(0, 15), (15, 30), (30, 40)]
    # Bytes elsewhere may be anything: they are not read.
    untouched = tensor.pieces[0]
    file = tmp_path / m.FOLDER / made.name / made.files[untouched.file].name
    content = bytearray(file.read_bytes())
    content[untouched.start] ^= 1
    file.write_bytes(content)
    (dtype, shape, data) = read_tensors(run, made, {"param/first.weight": (16, 37)})["param/first.weight"]
    assert (dtype, shape) == ("float32", (21, 3))
    read = unpacked((dtype, shape, data), torch.device("cpu"))
    assert torch.equal(read, state(1)["param/first.weight"][16:37])
    with pytest.raises(DamagedError, match="do not match their checksum"):
        read_tensors(run, made, {"param/first.weight": (0, 1)})


def test_the_files_are_safetensors_files(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    made = save(run, 3, writers=2)
    found: Tensors = {}
    for file in made.files:
        found |= safetensors.torch.load_file(tmp_path / m.FOLDER / made.name / file.name)
    assert same(found, state(3))


def test_one_checkpoint_is_complete_wherever_the_writer_stops(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(LocalFolder(folder), 4, writers=2)
    loaded: list[int] = []

    def write(disk: Disk) -> None:
        run = LocalFolder(folder, disk)
        made = save(run, 9, generation=1, writers=2)
        sweep(run, [made.name], made)

    def check(folder: Path) -> None:
        step, read = load(LocalFolder(folder))
        assert step in (4, 9)
        assert same(read, state(step))
        loaded.append(step)

    calls = after_every_stop(folder, write, check)
    assert calls > 30
    assert set(loaded) == {4, 9}
    # The newer checkpoint counts as soon as its manifest has its name.
    assert loaded[-3:] == [9, 9, 9]


@pytest.mark.parametrize("flips", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_damage_is_found_before_use_and_the_previous_checkpoint_is_loaded(tmp_path: Path, flips: int) -> None:
    run = LocalFolder(tmp_path)
    save(run, 4)
    made = save(run, 9)
    newest = [tmp_path / m.FOLDER / f"{made.name}.json", *sorted((tmp_path / m.FOLDER / made.name).iterdir())]
    draw = random.Random(0)
    tried = 0
    for file in newest:
        content = file.read_bytes()
        for at in {*range(0, len(content), max(1, len(content) // flips)), len(content) - 1}:
            damaged = bytearray(content)
            damaged[at] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            step, read = load(run)
            assert step == 4, f"{file.name}, byte {at}"
            assert same(read, state(4))
            tried += 1
        for length in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            assert load(run)[0] == 4
        file.write_bytes(content + b"x")
        assert load(run)[0] == 4
        file.unlink()
        assert load(run)[0] == 4
        file.write_bytes(content)
    assert load(run)[0] == 9
    assert tried > 2 * flips


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/checkpoints/0.*4-0.*/00000-of-00002\.sa"):
        shares(LocalFolder(tmp_path, Full("write")), state(4), m.name_of(4, 0), 2)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    made = save(run, 4, writers=2)
    file = tmp_path / m.FOLDER / made.name / "00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"00001-of-00002\.safetensors: the file is damaged: bytes [\d,]+ to"):
        load_of(run, made)
    file.write_bytes(content[:-1])
    [found] = survey(run)
    assert found.why == f"00001-of-00002.safetensors has {len(content) - 1:,} bytes, expected {len(content):,}"
    file.unlink()
    [found] = survey(run)
    assert found.why == "00001-of-00002.safetensors is missing"
    with pytest.raises(DamagedError, match="the file is missing"):
        load_of(run, made)


def load_of(run: Folder, made: m.Manifest) -> None:
    read_tensors(run, made, dict.fromkeys(made.tensors))


def test_a_survey_lists_unusable_checkpoints_with_the_reason(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    save(run, 4)
    save(run, 9, generation=1)
    save(run, 12, generation=1)
    shares(run, state(14), m.name_of(14, 3), 2)
    (tmp_path / m.FOLDER / "notes.txt").write_text("something else")
    newer = save(run, 13, generation=3)
    document = tmp_path / m.FOLDER / f"{newer.name}.json"
    rest = document.read_bytes().partition(b", ")[2].replace(b'"format": 1', b'"format": 2')
    document.write_bytes(b'{"xxh3_128": "' + m.xxhash.xxh3_128(rest).hexdigest().encode() + b'", ' + rest)
    told = {found.step: (found.manifest is not None, found.why) for found in survey(run, [(2, 9)])}
    assert list(told) == [14, 13, 12, 9, 4]
    assert told[14] == (False, "not finished: there is no manifest")
    assert told[13] == (False, "the checkpoint has format 2, but this version reads format 1")
    assert told[12] == (False, "void: the run resumed from an earlier checkpoint")
    assert (told[9], told[4]) == ((True, ""), (True, ""))
    assert survey(LocalFolder(tmp_path / "nothing")) == []


def test_old_checkpoints_are_removed_and_the_newest_never_is(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    for step in (1, 2, 3, 4):
        save(run, step)
    shares(run, state(2), m.name_of(2, 1), 2)
    under_way = shares(run, state(6), m.name_of(6, 2), 2)
    last = save(run, 5, generation=2)
    stay, go = m.kept([found.manifest for found in survey(run) if found.manifest], 2, ("loss", "min"))
    assert ([one.step for one in stay], [one.step for one in go]) == ([5, 4, 1], [3, 2])
    sweep(run, [one.name for one in stay], last)
    assert [(found.step, found.generation, found.why) for found in survey(run)] == [
        (6, 2, "not finished: there is no manifest"),
        (5, 2, ""),
        (4, 0, ""),
        (1, 0, ""),
    ]
    assert under_way
    assert [one.step for one in m.kept([last], 0, None)[0]] == [5]


def test_the_remains_of_a_killed_writer_are_listed_and_removed_with_the_next_checkpoint(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    (tmp_path / m.FOLDER / m.name_of(2, 0)).mkdir(parents=True)
    for name in (f"{m.name_of(2, 0)}/.00000-of-00001.safetensors.ab.part", f".{m.name_of(2, 0)}.json.cd.part"):
        (tmp_path / m.FOLDER / name).write_bytes(bytes(100))
    [found] = survey(run)
    assert (found.step, found.why, found.bytes) == (2, "not finished: there is no manifest", 100)
    made = save(run, 4)
    (tmp_path / m.FOLDER / m.name_of(6, 0)).mkdir()
    (tmp_path / m.FOLDER / m.name_of(6, 0) / ".00000-of-00001.safetensors.ef.part").touch()
    sweep(run, [made.name], made)
    assert sorted(path.name for path in (tmp_path / m.FOLDER).iterdir()) == [
        made.name,
        f"{made.name}.json",
        m.name_of(6, 0),
    ]


def test_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    made = save(run, 4)
    commit(run, made)
    with pytest.raises(CheckpointError, match="another controller has written this checkpoint"):
        commit(run, replace(made, time=2.5))


def test_a_forged_manifest_is_refused(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    made = save(run, 4, writers=1)
    document = m.manifest_bytes(made)
    file = tmp_path / m.FOLDER / f"{made.name}.json"
    for before, after in (
        (b"00000-of-00001.safetensors", b"../../../secret.safetensors"),
        (b'"float32"', b'"float31"'),
        (b'"first": 0', b'"first": 1'),
        (b'"shape": [40, 3]', b'"shape": [41, 3]'),
        (b'"step": 4', b'"step": 5'),
        (b'"head": ', b'"head": 9999999'),
        (b'"fingerprint"', b'"footprint"'),
        (b'"format"', b'"foremat"'),
        (b'"files": ', b'"files": ]'),
    ):
        rest = document.partition(b", ")[2].replace(before, after)
        file.write_bytes(b'{"xxh3_128": "' + m.xxhash.xxh3_128(rest).hexdigest().encode() + b'", ' + rest)
        [found] = survey(run)
        assert found.manifest is None, after
        assert isinstance(found.error, DamagedError), after


def test_a_checkpoint_that_lacks_parameters_of_others_is_incomplete(tmp_path: Path) -> None:
    """Older versions called one complete of which a stage was missing."""
    run = LocalFolder(tmp_path)
    save(run, 4)
    part = {name: value for name, value in state(9).items() if "first.bias" not in name}
    commit(run, described(9, 1, shares(run, part, m.name_of(9, 1), 2)))
    newest, older = survey(run)
    assert (newest.manifest, newest.damaged) == (None, True)
    assert newest.why == "incomplete: it lacks 1 of 2 parameters: first.bias"
    assert older.manifest is not None
    many = {f"param/{letter}": torch.zeros(1) for letter in "abcdef"}
    commit(run, described(14, 1, shares(run, many, m.name_of(14, 1), 2)))
    assert [one.why for one in survey(run)] == [
        "incomplete: it lacks 2 of 8 parameters: first.bias, first.weight",
        "incomplete: it lacks 7 of 8 parameters: a, b, c and 4 more",
        "incomplete: it lacks 6 of 8 parameters: a, b, c and 3 more",
    ]


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ({"first.weight": True, "first.bias": False}, ""),
        ({"first.weight": True, "second.weight": True}, "it lacks second.weight"),
        ({"first.bias": True}, "it lacks the optimizer's state of first.bias"),
        (["first.weight"], "its parameters are not listed by name"),
    ],
)
def test_a_manifest_has_every_parameter_that_its_writers_list(tmp_path: Path, listed: Any, fault: str) -> None:
    run = LocalFolder(tmp_path)
    made = described(4, 0, shares(run, state(4), m.name_of(4, 0), 2), tree={"weights": listed, "optimizer": {}})
    if not fault:
        assert m.parse_manifest(m.manifest_bytes(made), made.name) == made
        return
    with pytest.raises(DamagedError, match=f"the manifest is invalid: {fault}"):
        m.manifest_bytes(made)


def test_a_copied_folder_is_readable(tmp_path: Path) -> None:
    save(LocalFolder(tmp_path / "here"), 4)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert load(LocalFolder(tmp_path / "there"))[0] == 4


def test_arrays_that_are_read_are_writable_and_own_their_memory(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    made = save(run, 4)
    (_, _, data) = read_tensors(run, made, {"param/first.weight": None})["param/first.weight"]
    assert data.flags.writeable
    assert isinstance(data, np.ndarray)
