"""Build the summary shown at the end of a run. Pure."""

from __future__ import annotations

import time

from raytrain_plus.observe.expert_use import experts_text
from raytrain_plus.observe.run_progress import RunProgress, after_step, clock_text, metrics_text, plural, speed_text
from raytrain_plus.observe.step_profile import table
from raytrain_plus.result import Result, resume_command, saved_text
from raytrain_plus.storage.address import is_address, within


def summary(result: Result, progress: RunProgress | None) -> list[str]:
    """Return the last lines of a run: how it ended, its metrics, its files, and the next command.

    `progress`: the progress that its events added up to; None or an empty one if the run had already ended. The error
    of a failed run is not included: a view shows it before these lines, where errors belong.
    """
    if result.trained_steps == 0 and result.status == "finished" and (progress is None or not progress.workers):
        lines = [_already_finished(result), *_held_out(result, None), *_model(result)]
    else:
        lines = [*_head(result), *_held_out(result, progress), *_model(result), *_time(result, progress)]
    if result.stopped_early is not None:
        lines.insert(1, f"  stopped early: {result.stopped_early}")
    if result.show and result.show.strip():
        said = result.show.rstrip().splitlines()
        lines += ["", "  the model says:", *(f"    {line}".rstrip() for line in said), ""]
    folder = str(result.path)
    lines.append(f"  folder   {folder}")
    if result.state_sha256 is not None:
        lines.append(f"  model    {within(folder, 'model.safetensors')}")
    if not is_address(folder):
        lines.append(f"  events   {within(folder, 'events.ndjson')}")
    resume = resume_command(folder)
    if result.status == "failed":
        restart = "or start over: raytrain run JOB --fresh"
        return [*lines, f"  next     fix the error above, then resume: {resume}; {restart}"]
    if result.status == "stopped":
        lines.append(f"  next     to resume: {resume}, or repeat raytrain run JOB")
        saved = saved_text(result)
        return lines if saved is None else [*lines, saved]
    if is_address(folder):
        return [*lines, f"  next     raytrain export '{folder}' --to model.safetensors"]
    return [*lines, f"  next     pip install tensorboard && tensorboard --logdir {within(folder, 'tensorboard')}"]


def _already_finished(result: Result) -> str:
    """Return that a run had finished before, as one sentence with the remedy."""
    moment = "" if result.ended is None else time.strftime(" on %Y-%m-%d %H:%M", time.localtime(result.ended))
    return (
        f"{result.name} was already finished{moment}, after {plural(result.steps, 'step')}: nothing was trained; "
        "--fresh (fresh=True in Python) trains again"
    )


def _head(result: Result) -> list[str]:
    head = f"{result.name} {result.status}: {plural(result.steps, 'step')}, {plural(result.samples, 'sample')}"
    if not _resumed(result):
        return [f"{head}{_speed(result, result.samples)}"]
    samples = result.trained_samples or 0
    trained = f"{plural(result.trained_steps or 0, 'step')}, {plural(samples, 'sample')}{_speed(result, samples)}"
    return [head, f"  resumed  since then {trained}"]


def _resumed(result: Result) -> bool:
    """Return whether earlier processes of the run trained some of its steps; False if that is unknown."""
    return result.trained_steps is not None and result.trained_steps < result.steps


def _speed(result: Result, samples: int) -> str:
    if result.seconds <= 0:
        return ""
    return f" in {clock_text(result.seconds)}, {speed_text(samples / result.seconds)} samples/s"


def _held_out(result: Result, progress: RunProgress | None) -> list[str]:
    if progress is None or not progress.evaluations:
        return [f"  reached  {metrics_text(result.metrics)}"] if result.metrics else []
    (first_step, first), (last_step, last) = progress.evaluations[0], progress.evaluations[-1]
    width = max(map(len, last), default=0)
    lines = []
    for name, value in last.items():
        line = f"  held out {name:{width}}  "
        if first_step < last_step and name in first:
            line += f"{float(first[name]):.4f} {after_step(first_step)} -> {float(value):.4f} "
            line += "trained" if first_step < 0 else after_step(last_step)
        else:
            line += f"{float(value):.4f} {after_step(last_step)}"
        lines.append(line)
    return lines


def _model(result: Result) -> list[str]:
    """Return which state the model is, if a run that chooses the best one has ended."""
    if result.model_step is None:
        return []
    if result.model_step + 1 < result.steps:
        metrics = metrics_text(result.model_metrics)
        return [f"  best     the model is the state {after_step(result.model_step)}: {metrics}"]
    return ["  best     no better state was saved: the model is the last one"] * (result.stopped_early is not None)


def _time(result: Result, progress: RunProgress | None) -> list[str]:
    if not result.steps:
        return []
    waited = f"{100 * result.data_wait:.1f} % of step time was spent waiting for data"
    lines = []
    if result.trained_steps != 0:
        lines.append(f"  time     {'' if result.setup_s is None else f'{result.setup_s:.1f} s of setup; '}{waited}")
    if result.bubble is not None:
        lines.append(
            f"  stages   spent {100 * result.bubble:.0f} % of their time waiting for one another; diagram of one step: "
            f"{within(str(result.path), 'pipeline.svg')}"
        )
    if progress is not None and progress.experts:
        lines.append(f"  experts  {experts_text(progress.experts)}")
    if result.copies:
        share = 100 * result.copy_s / result.seconds if result.seconds > 0 else 0.0
        lines.append(f"  copies   {result.copies:,} of the state to other workers' memory, {share:.1f} % of the time")
    if result.skipped:
        lines.append(f"  skipped  {plural(result.skipped, 'step')}, whose loss or gradient was not finite")
    if result.rows_skipped:
        lines.append(
            f"  rows     {result.rows_skipped:,} skipped, which could not be used; `raytrain audit` says which"
        )
    if result.recoveries:
        losses = f"{result.recoveries:,} loss{'' if result.recoveries == 1 else 'es'}"
        goodput = f"goodput {100 * result.goodput:.1f} %{' since the run was resumed' * _resumed(result)}"
        # A run that was resumed had more recoveries than the events of its last process.
        known = progress is not None and progress.recoveries == result.recoveries
        steps = f", {plural(progress.steps_lost, 'step')} lost" if progress and known else ""
        lines.append(f"  losses   recovered from {losses}, {result.stall_s:.2f} s in all{steps}; {goodput}")
    if progress is not None and progress.waits:
        lines.append(f"  waits    {_remedy(progress)}")
    if result.profile is not None:
        lines += [*table(result.profile), f"    traces: {within(str(result.path), 'profile')}"]
    return lines


def _remedy(progress: RunProgress) -> str:
    """Return what would have avoided waiting for replacements of lost workers, as one sentence."""
    spare = "workers: {spares: 1} keeps a replacement ready"
    fewer = f"workers: {{min: {progress.enough}}} lets the others continue meanwhile, "
    avoid = spare if progress.enough is None else f"{fewer}{spare}"
    recoveries = f"{len(progress.waits):,} recover{'y' if len(progress.waits) == 1 else 'ies'}"
    return f"{recoveries} waited for a replacement, {sum(progress.waits):.2f} s in all; {avoid}"
