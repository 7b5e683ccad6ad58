"""A LightningModule's own methods, called with one batch each, give what Lightning gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from raytrain_plus.bring.item_kinds import kinds_of
from raytrain_plus.bring.lightning import Module
from raytrain_plus.bring.lightning.lightning_task import Brought, LightningTask
from raytrain_plus.bring.lightning.trainer_view import TrainerFacts
from raytrain_plus.data.sources.item_columns import schema_of, table_of
from raytrain_plus.errors import TaskError
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.task import RunFacts
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes.metric_sums import checked
from raytrain_plus.training.passes.outputs import padded
from raytrain_plus.training.passes.task_loss import task_loss
from tests.support.lit import Digits, DigitsData, Plain

CPU = torch.device("cpu")
ROWS = [(torch.tensor([float(n), n % 3, 1.0, -n]) / 8, float(n % 2)) for n in range(8)]


class Given(LightningTask):
    """The task of a module that a function makes."""

    def __init__(self, make: Callable[[], Any], **facts: Any) -> None:
        self.make = make
        brought = Brought(facts=TrainerFacts(**facts), collate=default_collate, kinds=kinds_of(ROWS[0]))
        super().__init__(brought)

    def bring(self) -> Any:
        return self.make()


def task_of(make: Callable[[], Any], total: int = 10, batch: int = 8, **facts: Any) -> Any:
    task = Given(make, **facts)
    task.run = RunFacts(total_steps=total, batch_size=batch)
    return task


def table(items: list[Any]) -> pa.Table:
    return table_of(items, schema_of(items))


def stepped(task: Any, items: list[Any] = ROWS) -> Any:
    """Return what a step reports, after the first one."""
    model = build_model(task, 0, CPU).module
    optimizer = task.optimizer(list(model.named_parameters()))
    schedules = task.scheduler(optimizer)
    found = task_loss(task, model, task.collate(table(items)), len(items))
    found.loss.backward()
    optimizer.step()
    schedules.step()
    return found


def evaluated(task: Any, *batches: list[Any]) -> dict[str, float]:
    """Return the metrics of held-out batches, as a run gathers them."""
    model = build_model(task, 0, CPU).module.eval()
    outputs = []
    for items in batches:
        with torch.no_grad():
            returned = task.evaluate(model, task.collate(table(items)))
        outputs.append(checked(returned, len(items), True, float(len(items)))[1])
    widest = max(one["bytes"].shape[1] for one in outputs)
    lengths = {"bytes": [widest], "lengths": [2]}
    joined = {name: torch.cat([padded(one[name], lengths[name]) for one in outputs]) for name in outputs[0]}
    return {name: float(value) for name, value in task.summarise(joined).items()}


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(TaskError) as error:
        stepped(task_of(make))
    return str(error.value)


def lightning_trainer(**given: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )


@pytest.mark.filterwarnings("ignore")
def test_steps_and_an_evaluation_are_those_of_lightning() -> None:
    order, batch, epochs = list(range(96)), 32, 3
    torch.manual_seed(0)
    plain = Digits()
    losses, rates = list[float](), list[float]()

    class Noted(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            losses.append(outputs["loss"].item())

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = lightning_trainer(max_epochs=epochs, callbacks=[Noted()], log_every_n_steps=1)
    trainer.fit(plain, datamodule=DigitsData(order, batch))

    def make() -> Any:
        torch.manual_seed(0)
        return Digits()

    task = task_of(make, total=9, batch=batch, rows=96, max_epochs=epochs)
    data = DigitsData(order, batch)
    data.setup("fit")
    items = [data.train[n] for n in range(96)]
    model = build_model(task, 0, CPU).module
    optimizer = task.optimizer(list(model.named_parameters()))
    schedules = task.scheduler(optimizer)
    for step, (loss, rate) in enumerate(zip(losses, rates, strict=True)):
        at = 32 * (step % 3)
        found = task_loss(task, model, task.collate(table(items[at : at + 32])), 32)
        assert found.loss.item() == pytest.approx(loss, rel=1e-5)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        schedules.step()
    assert schedules.epoch == 3
    assert found.metrics.keys() == {"train_loss", "train_accuracy_step"}
    theirs = trainer.callback_metrics
    held_out = [data.validation[n] for n in range(150)]
    ours = evaluated(task_of(lambda: plain, rows=96), *[held_out[at : at + 40] for at in range(0, 150, 40)])
    # The same, however the rows are batched.
    assert ours.keys() == {"val_loss", "val_accuracy", "val_f1", "val_kept", "val_mean_loss"}
    for name, value in ours.items():
        assert value == pytest.approx(float(theirs[name]), rel=1e-5), name


class Stepping(Plain):
    """What `configure_optimizers` returns is given."""

    def __init__(self, form: Callable[[Any], Any]) -> None:
        super().__init__()
        self.form = form

    def configure_optimizers(self) -> Any:
        return self.form(torch.optim.SGD(self.parameters(), lr=1.0))


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "rates"),
    [
        (lambda one: one, [1, 1, 1, 1, 1, 1]),
        (lambda one: [one], [1, 1, 1, 1, 1, 1]),
        (lambda one: ([one], [halved(one)]), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (lambda one: ([one], halved(one)), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (lambda one: {"optimizer": one}, [1, 1, 1, 1, 1, 1]),
        (lambda one: {"optimizer": one, "lr_scheduler": halved(one), "monitor": "x"}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (lambda one: [{"optimizer": one, "lr_scheduler": halved(one)}], [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (
            lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": halved(one), "interval": "step"}},
            [1, 0.5, 0.25, 0.125, 0.0625, 0.03125],
        ),
        (
            lambda one: {
                "optimizer": one,
                "lr_scheduler": {"scheduler": halved(one), "interval": "step", "frequency": 2},
            },
            [1, 1, 0.5, 0.5, 0.25, 0.25],
        ),
        (
            lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": halved(one), "frequency": 2}},
            [1, 1, 1, 1, 0.5, 0.5],
        ),
    ],
)
def test_schedulers_are_stepped_as_lightning_does(form: Any, rates: list[float]) -> None:
    task = task_of(lambda: Stepping(form), batch=8, rows=16)
    model = build_model(task, 0, CPU).module
    optimizer = task.optimizer(list(model.named_parameters()))
    schedules, found = task.scheduler(optimizer), []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedules.step()
    assert found == rates

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            theirs.append(trainer.optimizers[0].param_groups[0]["lr"])

    theirs: list[float] = []
    loader = torch.utils.data.DataLoader([*ROWS, *ROWS], 8)
    lightning_trainer(max_epochs=3, callbacks=[Rates()]).fit(Stepping(form), loader)
    assert theirs == rates


def test_the_counts_of_steps_and_epochs_are_part_of_the_state() -> None:
    def made() -> Any:
        task = task_of(lambda: Stepping(lambda one: ([one], [halved(one)])), batch=8, rows=20)
        optimizer = task.optimizer(list(build_model(task, 0, CPU).module.named_parameters()))
        schedules = task.scheduler(optimizer)
        optimizer.step()
        return task, schedules

    _, schedules = made()
    epochs = []
    for _ in range(6):
        epochs.append((schedules.epoch, schedules.step_of_epoch))
        schedules.step()
    # Steps go on over the end of an epoch of 20 rows.
    assert epochs == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    task, joined = made()
    joined.load_state_dict(schedules.state_dict())
    assert (joined.last_epoch, joined.epoch, joined.step_of_epoch) == (6, 2, 1)
    assert joined.state_dict() == schedules.state_dict()
    assert task._view.global_step == 6
    assert task._view.current_epoch == 2


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Two(Plain):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.layer.weight], lr=1.0), torch.optim.SGD([self.layer.bias], lr=1.0)]


class Untrained(Plain):
    def configure_optimizers(self) -> Any:
        return None


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterating(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class Skipping(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Vector(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", batch[0].mean(0))
        return super().training_step(batch, batch_idx)


class Stopping(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Reaching(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.strategy.reduce(super().training_step(batch, batch_idx))


class Early(Plain):
    """Makes its optimizer before a worker has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Freezing(Plain):
    def on_train_epoch_start(self) -> None:
        self.layer.bias.requires_grad_(False)


class FreezingLater(Plain):
    def on_train_epoch_end(self) -> None:
        self.layer.bias.requires_grad_(False)


class Reading(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.trainer.datamodule.scale


class Summed(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, reduce_fx="sum", on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Plateau, "ReduceLROnPlateau needs a metric"),
        (Two, "returned 2 optimizers"),
        (Untrained, "returned None"),
        (Manual, "automatic_optimization = False"),
        (Iterating, "takes dataloader_iter"),
        (Skipping, "training_step returned no loss"),
        (Vector, r"self.log('x') got a tensor of shape (4,)"),
        (Stopping, "self.trainer.should_stop is not offered"),
        (Reaching, "self.trainer.strategy is not offered"),
        (Early, "an optimizer of none of the parameters that are trained"),
        (Freezing, "on_train_epoch_start changes which parameters are trained"),
        (Reading, "self.trainer.datamodule is not offered"),
        (Summed, "reduce_fx='sum'"),
        (lambda: nn.Linear(4, 1), "the module is of type Linear"),
    ],
)
def test_what_a_run_does_not_have_is_refused_by_name(make: Any, said: str) -> None:
    assert said in refused(make)


@pytest.mark.parametrize(
    "name",
    [
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "configure_gradient_clipping",
        "on_after_backward",
        "on_before_zero_grad",
        "on_before_backward",
        "configure_sharded_model",
        "all_gather",
        "on_validation_model_eval",
        "validation_epoch_end",
    ],
)
def test_an_overridden_method_that_a_run_would_not_call_is_refused(name: str) -> None:
    kind = type("Own", (Plain,), {name: lambda self, *_, **__: None})
    assert f"Own overrides {name}" in refused(kind)


def test_parameters_cannot_be_frozen_at_the_end_of_an_epoch() -> None:
    with pytest.raises(TaskError, match="on_train_epoch_end changes which parameters are trained"):
        stepped(task_of(FreezingLater, rows=8))


def test_a_scheduler_of_epochs_needs_their_length() -> None:
    task = task_of(lambda: Stepping(lambda one: ([one], [halved(one)])))
    optimizer = task.optimizer(list(build_model(task, 0, CPU).module.named_parameters()))
    with pytest.raises(TaskError, match="how long an epoch is is not known"):
        task.scheduler(optimizer)


class Logging(Plain):
    """Logs in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.curve = BinaryAUROC(thresholds=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("plain", loss, prog_bar=True, sync_dist=True, rank_zero_only=True)
        self.log("both", 1, on_step=True, on_epoch=True)
        self.log("epoch", torch.tensor([2.0]), on_step=False, on_epoch=True)
        self.log("none", 3.0, on_step=False, on_epoch=False)
        self.log("loss", 4.0)
        self.mean(5.0)
        self.log_dict({"metric": self.mean, "other": 6.0})
        return {"loss": loss, "more": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not outputs["more"].requires_grad
        self.log("after", float(len(batch[0])))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val", x.sum(), batch_size=int(y.sum()) + 1)
        self.log("lowest", x.min(), reduce_fx="min")
        self.log("highest", x.max(), reduce_fx=torch.max)
        self.log("rows", float(len(x)), reduce_fx="sum")
        self.log("step", 1.0, on_step=True)
        self.curve(torch.sigmoid(x[:, 0] - x[:, 3]), y.long())
        self.log("curve", self.curve)


def test_each_form_of_log_is_a_metric_of_the_step() -> None:
    found = {name: float(value) for name, value in stepped(task_of(Logging)).metrics.items()}
    loss = found.pop("plain")
    assert loss > 0
    assert found == {
        "both_step": 1.0,
        "epoch_epoch": 2.0,
        "logged_loss": 4.0,
        "metric": 5.0,
        "other": 6.0,
        "after": 8.0,
    }


def test_the_metrics_of_an_evaluation_are_over_all_its_rows() -> None:
    few, many = ROWS[:3], ROWS[3:]
    found = evaluated(task_of(Logging), few, many)
    x = torch.stack([one for one, _ in ROWS])
    labels = torch.tensor([int(label) for _, label in ROWS])
    sums, weights = [x[:3].sum(), x[3:].sum()], [labels[:3].sum() + 1, labels[3:].sum() + 1]
    assert found["val"] == pytest.approx(
        float(sum(s * w for s, w in zip(sums, weights, strict=True)) / sum(weights)), rel=1e-6
    )
    assert (found["lowest"], found["highest"], found["rows"]) == (float(x.min()), float(x.max()), 8.0)
    assert found["step"] == found["step_epoch"] == 1.0
    # It is no mean over batches.
    whole = BinaryAUROC(thresholds=None)(torch.sigmoid(x[:, 0] - x[:, 3]), labels)
    assert found["curve"] == pytest.approx(float(whole))


class Keeping(Plain):
    """Keeps more than lists over an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"rows": 0}
        self.names = ["a", "b"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["rows"] += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("seen", float(self.seen["rows"]))


def test_what_an_evaluation_keeps_on_one_worker_only_is_refused() -> None:
    with pytest.raises(TaskError, match="validation_step changes 'seen' of the module"):
        evaluated(task_of(Keeping), ROWS[:4], ROWS[4:])


def test_lists_are_gathered_over_an_evaluation_and_others_stay() -> None:
    model = Digits(width=8)
    model.names = ["a", "b"]
    items = [(torch.rand(64), n % 10) for n in range(8)]
    task = task_of(lambda: model)
    assert set(evaluated(task, items[:4], items[4:])) >= {"val_kept"}
    assert model.names == ["a", "b"]
    assert model.kept == []


def test_metrics_are_no_part_of_the_state_and_begin_anew_with_each_step() -> None:
    task = task_of(Digits, rows=8)
    model: Any = build_model(task, 0, CPU).module
    assert [name for name, _ in model.named_modules() if "accuracy" in name] == []
    assert "kept" not in model.state_dict()
    items = [(torch.rand(64), n % 10) for n in range(8)]
    for _ in range(2):
        task_loss(task, model, task.collate(table(items)), 8)
        assert model.train_accuracy.tp.sum() + model.train_accuracy.fn.sum() == 8


class Mixed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"mean": MeanMetric(), "layer": nn.Linear(1, 1)})


def test_a_container_of_metrics_and_others_is_refused() -> None:
    assert "'parts' holds both metrics and other modules" in refused(Mixed)


class Hooked(Plain):
    """Notes the hooks that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 4)

    def note(self, name: str) -> None:
        CALLED.append(name)

    def configure_model(self) -> None:
        self.note("configure_model")

    def setup(self, stage: str) -> None:
        self.note(f"setup {stage} {self.trainer.max_epochs}")

    def on_fit_start(self) -> None:
        self.note("on_fit_start")

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.log("of the first batch", 1.0)
        self.note(f"epoch {self.current_epoch} begins")

    def on_train_epoch_end(self) -> None:
        self.log("ignored", 1.0)
        self.note(f"epoch {self.current_epoch} is next")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 3, batch[1]]

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        trainer = self.trainer
        assert (trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.training) == (10, 2, True)
        assert (trainer.world_size, trainer.is_global_zero, self.global_rank) == (1, True, 0)
        assert self.optimizers().param_groups[0]["lr"] == 0.1
        self.logger.experiment.add_scalar("x", 1.0)
        self.log("seen", batch[0].sum())
        self.log("step", float(self.global_step))
        return super().training_step(batch, 0)


CALLED: list[str] = []


def test_hooks_are_called_in_the_order_of_lightning() -> None:
    CALLED.clear()
    task = build_task(
        Module, {"module": f"{__name__}:Hooked", "rows": 16, "max_epochs": 5}, RunFacts(total_steps=10, batch_size=8)
    )
    model = build_model(task, 0, CPU).module
    assert CALLED == ["setup fit 5", "configure_model", "on_fit_start", "on_train_start"]
    optimizer = task.optimizer(list(model.named_parameters()))
    schedules: Any = task.scheduler(optimizer)
    CALLED.clear()
    batch = task.collate(table(ROWS))
    for step in range(3):
        # Two microbatches.
        for _ in range(2):
            found = task_loss(task, model, batch, 8)
            assert found.metrics.keys() == {"seen", "step"}
        assert found.metrics["step"] == step
        optimizer.step()
        schedules.step()
    assert CALLED == ["epoch 0 begins", "epoch 1 is next", "epoch 1 begins"]
    shifted = (torch.stack([one for one, _ in ROWS]) + 1) * 2 + 3
    assert float(found.metrics["seen"]) == pytest.approx(float(shifted.sum()))
    assert task.remarks() == [
        "what on_train_epoch_start logs is not reported; each step reports its rates",
        "what on_train_epoch_end logs is not reported; log it in training_step with on_epoch=True",
    ]


def test_groups_of_parameters_are_those_that_a_run_changes() -> None:
    class Frozen(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2).requires_grad_(False)
            self.tied = self.layer

    task = task_of(Frozen)
    given = [("layer.weight", nn.Parameter(torch.zeros(1, 4))), ("layer.bias", nn.Parameter(torch.zeros(1)))]
    [group] = task.optimizer(given).param_groups
    assert [id(one) for one in group["params"]] == [id(one) for _, one in given]
    # Rows of a weight that several workers divide.
    pieces = [("layer.weight", nn.Parameter(torch.zeros(n))) for n in (1, 2)]
    [group] = task.optimizer(pieces).param_groups
    assert [len(one) for one in group["params"]] == [1, 2]


def test_a_datamodule_of_a_job_file_makes_the_batches() -> None:
    given = {"datamodule": "tests.support.lit:DigitsData", "data_hparams": {"order": [3, 1, 2], "batch_size": 2}}
    task: Any = build_task(
        Module,
        {"module": "tests.support.lit:Digits", "hparams": {"width": 8}, **given},
        RunFacts(total_steps=6, batch_size=2),
    )
    data = task._view.datamodule
    batch = task.collate(table([data.train[0], data.train[1]]))
    assert batch["batch"][0].shape == (2, 64)
    assert batch["batch"][1].tolist() == [3, 1]
    model: Any = build_model(task, 0, CPU).module
    assert model.head.in_features == 8
    assert model.trainer.datamodule is data
    assert task._brought.facts.rows == 3
