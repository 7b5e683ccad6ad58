"""A Lightning script with one changed import: Lightning's own numbers, one hash on any workers, through a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from raytrain_plus.audit.audit import audit
from raytrain_plus.bring.lightning import Trainer
from raytrain_plus.errors import RaytrainError
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.export import NEWEST, export_to
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.lit import Digits, DigitsData, Plain

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]

SHARDS, MICROBATCH, STEPS = 3, 12, 8
"""Shards, their rows in a step, and the steps of an epoch."""
PER_SHARD = STEPS * MICROBATCH
ORDER = list(range(SHARDS * PER_SHARD))


class Dying(Digits):
    """A worker dies once in one of its methods."""

    def __init__(self, place: str, mark: str) -> None:
        super().__init__(norm="LayerNorm")
        self.place, self.mark = place, mark

    def die(self, place: str) -> None:
        if place != self.place or self.global_step < 5 or not self.mark:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.die("training_step")
        assert batch_idx == self.global_step % STEPS
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.die("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.die("on_train_epoch_end")


def module(place: str = "", mark: str = "") -> Dying:
    torch.manual_seed(0)
    return Dying(place, mark)


def stopping() -> list[Any]:
    """Return callbacks that end the run after its second epoch: the loss does not rise."""
    return [EarlyStopping("val_loss", patience=1, mode="max", check_finite=False), LearningRateMonitor()]


def steps_of(folder: LocalFolder) -> list[dict[str, Any]]:
    newest = {event["step"]: event for event in read_events(folder) if event["kind"] == "step_committed"}
    return [newest[step] for step in sorted(newest)]


@pytest.mark.parametrize(
    "place",
    [
        "training_step",
        pytest.param("validation_step", marks=pytest.mark.slow),
        pytest.param("on_train_epoch_end", marks=pytest.mark.slow),
    ],
)
def test_a_script_with_one_changed_import_gives_lightnings_own_numbers_through_a_death(
    tmp_path: Path, place: str
) -> None:
    given = {"reduction": "exact", "data": {"batch_size": SHARDS * MICROBATCH, "shards": SHARDS}}
    found = {}
    for name, workers in (("one", {"min": 1, "max": 1}), ("three", {"min": 2, "max": 3})):
        made = module(place, str(tmp_path / "died") if name == "three" else "")
        trainer = Trainer(
            max_epochs=3,
            callbacks=stopping(),
            gradient_clip_val=0.5,
            default_root_dir=tmp_path / name,
            run={**given, "workers": workers},
        )
        trainer.fit(made, datamodule=DigitsData(ORDER, MICROBATCH))
        folder = LocalFolder(tmp_path / name / "lightning_logs" / "run")
        result = Result.load(folder)
        assert result is not None
        checked = audit(str(tmp_path / name / "lightning_logs" / "run"))
        assert checked.clean, checked.faults
        steps = steps_of(folder)
        found[name] = (result.state_sha256, [event["loss"] for event in steps], trainer.callback_metrics)
    assert [event for event in read_events(folder) if event["kind"] == "recovered"]
    assert found["one"] == found["three"]
    # A shard has a third of the rows: the batches of the run, as one process reads them.
    order = [
        PER_SHARD * shard + MICROBATCH * step + row
        for step in range(STEPS)
        for shard in range(SHARDS)
        for row in range(MICROBATCH)
    ]
    plain, losses, rates = module(), list[float](), list[float]()

    class Noted(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].item())

    theirs = pl.Trainer(
        max_epochs=3,
        callbacks=[stopping()[0], Noted()],
        gradient_clip_val=0.5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    theirs.fit(plain, datamodule=DigitsData(order, SHARDS * MICROBATCH))
    assert len(losses) == 2 * STEPS
    assert found["three"][1] == pytest.approx(losses, rel=1e-4)
    assert [event["lr"][0] for event in steps] == pytest.approx(rates)
    for name, value in trainer.callback_metrics.items():
        if not name.startswith("train_accuracy"):
            assert float(value) == pytest.approx(float(theirs.callback_metrics[name]), rel=1e-4), name
    for name, value in plain.state_dict().items():
        assert torch.allclose(made.state_dict()[name], value, atol=1e-4), name
    data = DigitsData(ORDER, MICROBATCH)
    ours = trainer.test(made, datamodule=data, verbose=False)[0]["test_loss"]
    assert ours == pytest.approx(theirs.test(plain, datamodule=data, verbose=False)[0]["test_loss"], rel=1e-4)


def test_a_checkpoint_of_lightning_opens_and_a_run_is_resumed(tmp_path: Path) -> None:
    def trainer(epochs: int = 2) -> Trainer:
        best = ModelCheckpoint(monitor="val_loss", save_top_k=2)
        return Trainer(max_epochs=epochs, callbacks=[best], default_root_dir=tmp_path)

    torch.manual_seed(0)
    made = Digits(width=16)
    data = DigitsData(ORDER, 36)
    trainer().fit(made, datamodule=data)
    file = tmp_path / "digits.ckpt"
    said = export_to(str(tmp_path / "lightning_logs" / "run"), "runs", file, "lightning", NEWEST)
    assert "the model after step 16" in said
    opened = Digits.load_from_checkpoint(file)
    assert opened.hparams.width == 16
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in opened.state_dict().items())
    saved = torch.load(file, weights_only=False)
    assert (saved["global_step"], saved["epoch"]) == (16, 2)
    # A finished run is not made again.
    again = trainer()
    again.fit(Digits(width=16), datamodule=data, ckpt_path="last")
    assert again.global_step == 16
    with pytest.raises(RaytrainError, match="max_epochs=2, and this is 3"):
        trainer(3).fit(Digits(width=16), datamodule=data, ckpt_path="last")


class Logged(pl.Callback):
    """Writes down what it hears."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with open(self.file, "a") as file:
            file.write(f"{trainer.current_epoch} {trainer.global_step} {sorted(trainer.callback_metrics)}\n")


def test_loaders_and_a_callback_of_the_scripts_own(tmp_path: Path) -> None:
    rows = TensorDataset(torch.rand(24, 4), torch.rand(24))
    torch.manual_seed(0)
    trainer = Trainer(max_epochs=2, callbacks=[Logged(str(tmp_path / "heard"))], default_root_dir=tmp_path)
    made = Plain()
    before = made.layer.weight.detach().clone()
    trainer.fit(made, DataLoader(rows, 6, shuffle=True))
    assert trainer.global_step == 8
    assert not torch.equal(before, made.layer.weight)
    assert (tmp_path / "heard").read_text().splitlines() == ["0 4 []", "1 8 []"]
