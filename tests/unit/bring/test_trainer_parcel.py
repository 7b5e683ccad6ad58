"""What travels to the workers can be read where only this package and the libraries are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.bring.parcel import HELD_OUT, TRAIN, check_same, module_of, new_parcel, read_parcel_model
from raytrain_plus.bring.trainer_parcel import read_trainer, write_parcel
from raytrain_plus.errors import InputError
from raytrain_plus.job.task_loader import load_function


class Arguments:
    def __init__(self, **given: Any) -> None:
        self.given = given

    def to_dict(self) -> dict[str, Any]:
        return self.given


def parts(**given: Any) -> Any:
    return SimpleNamespace(processing_class=None, **{"args": Arguments(seed=1), **given})


def test_the_datasets_are_functions_of_a_module_of_the_parcel(tmp_path: Path) -> None:
    for number, rows in enumerate(([1, 2], [3])):
        folder = tmp_path / str(number)
        write_parcel(folder, parts(), nn.Linear(2, 1), rows, [9])
        assert load_function(f"{module_of(folder)}:{TRAIN}", [folder])() == rows
        assert load_function(f"{module_of(folder)}:{HELD_OUT}", [folder])() == [9]


def test_a_model_is_read_with_and_without_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    write_parcel(tmp_path, parts(), model, [1], None)
    assert not (tmp_path / "held_out.pkl").exists()
    read = read_parcel_model(tmp_path, torch.device("cpu"))
    assert torch.equal(read.weight, model.weight)
    assert not read.bias.requires_grad
    assert read_parcel_model(tmp_path, torch.device("meta")).weight.is_meta


def test_code_that_only_this_machine_has_travels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above, module = ModuleType("evaluate_modules"), ModuleType("evaluate_modules.mine")
    exec("class Metric:\n    def compute(self):\n        return FACTOR * 2\n\nFACTOR = 21\n", vars(module))
    monkeypatch.setitem(sys.modules, "evaluate_modules", above)
    monkeypatch.setitem(sys.modules, "evaluate_modules.mine", module)
    made: Any = module
    write_parcel(tmp_path, parts(metric=made.Metric()), None, [1], None)
    monkeypatch.delitem(sys.modules, "evaluate_modules.mine")
    monkeypatch.delitem(sys.modules, "evaluate_modules")
    assert read_trainer(tmp_path).metric.compute() == 42


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    above = tmp_path / "run.trainer"
    assert new_parcel(above) == above / "1"
    for name in ("1", "10", "notes"):
        (above / name).mkdir(parents=True)
    assert new_parcel(above) == above / "11"


def test_a_run_is_resumed_with_its_own_arguments(tmp_path: Path) -> None:
    write_parcel(tmp_path, parts(), None, [1], None)
    check_same(tmp_path, {"seed": 1}, "TrainingArguments", "train()")
    with pytest.raises(InputError, match="the run was begun with seed=1, and this is 2"):
        check_same(tmp_path, {"seed": 2}, "TrainingArguments", "train()")
    with pytest.raises(InputError, match="the script's part of this run cannot be read"):
        check_same(tmp_path / "none", {"seed": 1}, "TrainingArguments", "train()")


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    lock = (one for one in ())
    for given, what in (({"trainer": parts(lock=lock)}, "the trainer"), ({"train": lock}, "the training dataset")):
        trainer, train = given.get("trainer", parts()), given.get("train", [1])
        with pytest.raises(InputError, match=f"{what}.* cannot be pickled"):
            write_parcel(tmp_path, trainer, None, train, None)
    model = nn.Linear(1, 1)
    model.lock = lock  # type: ignore[assignment]
    with pytest.raises(InputError, match="the model cannot be pickled"):
        write_parcel(tmp_path, parts(), model, [1], None)
