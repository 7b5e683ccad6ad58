"""The summary at the end of a run."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.observe.run_progress import RunProgress
from raytrain_plus.observe.views.summary import summary
from raytrain_plus.result import Result
from tests.unit.observe.feed import event, experts, view

FOLDER = Path("runs/gpt")


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "name": "gpt",
        "status": "finished",
        "exit_code": 0,
        "path": FOLDER,
        "steps": 300,
        "samples": 14400,
        "seconds": 120.0,
        "setup_s": 3.24,
        "data_wait": 0.0123,
        "metrics": {"loss": 1.5, "train_loss": 1.4},
        "state_sha256": "c0ffee",
    }
    return Result(**{**values, **changes})


def progress(*evaluations: tuple[int, dict[str, float]]) -> RunProgress:
    return RunProgress(total=300, evaluations=list(evaluations))


def test_the_summary_of_a_finished_run() -> None:
    figures = [(-1, {"bits_per_byte": 8.0, "loss": 5.5}), (299, {"bits_per_byte": 2.2, "loss": 1.5})]
    assert summary(result(show="def f():\n    pass"), progress(*figures)) == [
        "gpt finished: 300 steps, 14,400 samples in 2:00, 120 samples/s",
        "  held out bits_per_byte  8.0000 untrained -> 2.2000 trained",
        "  held out loss           5.5000 untrained -> 1.5000 trained",
        "  time     3.2 s of setup; 1.2 % of step time was spent waiting for data",
        "",
        "  the model says:",
        "    def f():",
        "        pass",
        "",
        f"  folder   {FOLDER}",
        f"  model    {FOLDER / 'model.safetensors'}",
        f"  events   {FOLDER / 'events.ndjson'}",
        f"  next     pip install tensorboard && tensorboard --logdir {FOLDER / 'tensorboard'}",
    ]


def test_the_last_loads_of_experts_are_in_it() -> None:
    told = progress()
    told.add(experts(299, block0=[5, 1]))
    assert summary(result(), told)[3] == "  experts  MaxVio 0.67 at most (block0), none dropped"
    assert not any("experts" in line for line in summary(result(), progress()))


def test_blank_lines_around_the_models_text_are_left_out() -> None:
    lines = summary(result(show="a\n\nb\n \n\n"), progress())
    assert lines[3:9] == ["", "  the model says:", "    a", "", "    b", ""]
    assert "  the model says:" not in summary(result(show="\n  "), progress())


def test_a_run_at_an_address_names_the_command_that_exports_its_model() -> None:
    assert summary(result(path="s3://bucket/runs/gpt?region=x"), None)[-3:] == [
        "  folder   s3://bucket/runs/gpt?region=x",
        "  model    s3://bucket/runs/gpt/model.safetensors?region=x",
        "  next     raytrain export 's3://bucket/runs/gpt?region=x' --to model.safetensors",
    ]


def test_a_run_that_had_already_ended_shows_its_metrics() -> None:
    lines = summary(result(), progress())
    assert lines[1] == "  reached  loss 1.5000, train_loss 1.4000"
    assert summary(result(), None) == lines


def test_a_run_that_was_not_run_again_says_so() -> None:
    lines = summary(result(trained_steps=0, ended=1_790_000_000.0), progress())
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_790_000_000.0))
    assert lines[:3] == [
        f"gpt was already finished on {moment}, after 300 steps: nothing was trained; "
        "--fresh (fresh=True in Python) trains again",
        "  reached  loss 1.5000, train_loss 1.4000",
        f"  folder   {FOLDER}",
    ]
    assert summary(result(trained_steps=0), None)[0].startswith("gpt was already finished, after 300 steps")
    # Its controller died after the last step: another one has ended the run.
    assert summary(result(trained_steps=0), replace(progress(), workers=2))[0].startswith("gpt finished: 300 steps")


@pytest.mark.parametrize(
    ("model_step", "said"),
    [
        (29, "  best     the model is the state after step 30: loss 1.2500"),
        (49, "  best     no better state was saved: the model is the last one"),
    ],
)
def test_a_run_that_stopped_early_says_which_state_the_model_is(model_step: int, said: str) -> None:
    why = "loss has not improved since step 30"
    ended = result(steps=50, stopped_early=why, model_step=model_step, model_metrics={"loss": 1.25})
    lines = summary(ended, progress((-1, {"loss": 5.5}), (49, {"loss": 1.5})))
    assert lines[1:4] == [f"  stopped early: {why}", "  held out loss  5.5000 untrained -> 1.5000 trained", said]
    assert said in summary(replace(ended, trained_steps=0), progress())


def test_a_run_that_made_all_its_steps_says_so_only_if_the_model_is_not_the_last_state() -> None:
    told = {step: summary(result(model_step=step, model_metrics={"loss": 1.25}), progress()) for step in (29, 299)}
    best = {step: [line for line in lines if line.startswith("  best")] for step, lines in told.items()}
    assert best == {29: ["  best     the model is the state after step 30: loss 1.2500"], 299: []}


def test_a_single_evaluation_claims_no_progress() -> None:
    assert summary(result(), progress((-1, {"loss": 5.5})))[1] == "  held out loss  5.5000 untrained"


def test_a_resumed_run_tells_its_last_process_from_the_whole() -> None:
    changes = {"trained_steps": 20, "trained_samples": 960, "recoveries": 3, "stall_s": 1.5, "goodput": 0.5}
    lines = summary(result(**changes), progress())
    assert lines[:2] == [
        "gpt finished: 300 steps, 14,400 samples",
        "  resumed  since then 20 steps, 960 samples in 2:00, 8 samples/s",
    ]
    assert "  losses   recovered from 3 losses, 1.50 s in all; goodput 50.0 % since the run was resumed" in lines
    lines = summary(result(trained_steps=0, trained_samples=0, seconds=0.0), replace(progress(), workers=1))
    assert lines[1:3] == ["  resumed  since then 0 steps, 0 samples", "  reached  loss 1.5000, train_loss 1.4000"]
    assert not [line for line in lines if "time" in line]


def recovered(*, waited: bool, stages: int = 1) -> RunProgress:
    """Return the progress after a loss, whose recovery has waited for a replacement or not."""
    seen = RunProgress(total=300)
    formed = view(6, 6)
    formed["members"][1]["stage"] = stages - 1
    seen.add(formed)
    seen.add(event("worker_lost", worker="worker-1", pid=1, node="n", cause="killed"))
    if waited:
        seen.add(event("waiting", **{"for": "1 more worker"}))
    seen.add(
        event("recovered", cause="x", stall_s=4.25, steps_lost=2, steps_recomputed=0, kept=[], replaced=[], phases={})
    )
    return seen


def test_the_steps_that_losses_cost_are_told_if_all_are_known() -> None:
    one, two = ({"recoveries": count, "stall_s": 4.25, "goodput": 0.5} for count in (1, 2))
    line = "  losses   recovered from 1 loss, 4.25 s in all, 2 steps lost; goodput 50.0 %"
    assert line in summary(result(**one), recovered(waited=False))
    lines = summary(result(**two), recovered(waited=False))
    assert "  losses   recovered from 2 losses, 4.25 s in all; goodput 50.0 %" in lines


def test_a_recovery_that_waited_names_what_would_have_avoided_it() -> None:
    told = "  waits    1 recovery waited for a replacement, 4.25 s in all; "
    spare = "workers: {spares: 1} keeps a replacement ready"
    lines = summary(result(recoveries=1), recovered(waited=True))
    assert f"{told}workers: {{min: 1}} lets the others continue meanwhile, {spare}" in lines
    assert f"{told}{spare}" in summary(result(recoveries=1), recovered(waited=True, stages=2))
    assert not [line for line in summary(result(recoveries=1), recovered(waited=False)) if "waited" in line]


def test_a_resumed_run_compares_with_where_it_resumed() -> None:
    lines = summary(result(), progress((99, {"loss": 2.0}), (299, {"loss": 1.5, "new": 1.0})))
    assert lines[1:3] == [
        "  held out loss  2.0000 after step 100 -> 1.5000 after step 300",
        "  held out new   1.0000 after step 300",
    ]


def test_a_failed_run_names_its_model_if_any_and_leaves_its_error_to_the_view() -> None:
    saved = summary(result(status="failed", exit_code=1, error="loss is nan\n  at step 3"), progress())
    assert f"  model    {FOLDER / 'model.safetensors'}" in saved
    assert saved[-1] == (
        f"  next     fix the error above, then resume: raytrain resume {FOLDER}; "
        "or start over: raytrain run JOB --fresh"
    )
    failed = result(status="failed", exit_code=1, error="loss is nan\n  at step 3", state_sha256=None)
    lines = summary(failed, progress())
    assert lines[0].startswith("gpt failed: ")
    assert not [line for line in lines if "nan" in line]
    assert not [line for line in lines if "model.safetensors" in line or "tensorboard" in line]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (FOLDER, f"raytrain resume {FOLDER},"),
        (Path("my runs/gpt"), "raytrain resume 'my runs/gpt',"),
        ("s3://bucket/runs/gpt?region=x", "raytrain resume 's3://bucket/runs/gpt?region=x',"),
    ],
)
def test_a_stopped_run_names_the_command_that_resumes_it(path: Path | str, words: str) -> None:
    *_, last, saved = summary(result(status="stopped", exit_code=130, path=path, saved_step=19), progress())
    assert saved.startswith("state after step ")
    assert last == f"  next     to resume: {words} or repeat raytrain run JOB"


def test_a_run_without_a_step_shows_no_times() -> None:
    lines = summary(result(steps=0, samples=0, seconds=0.0, setup_s=None, metrics={}, error="x"), progress())
    assert lines[:2] == ["gpt finished: 0 steps, 0 samples", f"  folder   {FOLDER}"]


def test_a_setup_that_was_not_measured_is_left_out() -> None:
    assert "  time     1.2 % of step time was spent waiting for data" in summary(result(setup_s=None), None)


def test_the_cost_of_copies_in_memory_is_shown() -> None:
    lines = summary(result(copies=1200, copy_s=0.6), progress())
    assert "  copies   1,200 of the state to other workers' memory, 0.5 % of the time" in lines
    assert not [line for line in summary(result(), progress()) if "copies" in line]


def test_rows_that_were_skipped_are_counted() -> None:
    line = "  rows     1,024 skipped, which could not be used; `raytrain audit` says which"
    assert line in summary(result(rows_skipped=1024), None)
    assert not [line for line in summary(result(), None) if "audit" in line]


def test_steps_that_were_skipped_are_counted() -> None:
    assert "  skipped  3 steps, whose loss or gradient was not finite" in summary(result(skipped=3), None)
    assert not [line for line in summary(result(), None) if "skipped" in line]
