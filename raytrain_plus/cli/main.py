"""The commands of `raytrain`.

Each command imports what it needs itself, so that `raytrain --help` stays fast.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raytrain_plus.cli.answer import Answer, answered, ended, failure, json_option, reported, view_of
from raytrain_plus.cli.new_project import data, init, install_horovod, new_job
from raytrain_plus.cli.submitted import asked_cluster, jobs_at, submit_resume, submit_run, watch_job
from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import InputError, RaytrainError
from raytrain_plus.install.missing_package import missing_package
from raytrain_plus.launch.bug_report import bug_report
from raytrain_plus.launch.ray_address import is_dashboard
from raytrain_plus.launch.request import RescaleRequest, StopRequest
from raytrain_plus.release import VERSION
from raytrain_plus.result import Result, saved_text
from raytrain_plus.storage.folders.open import open_folder

if TYPE_CHECKING:
    from raytrain_plus.launch.handle import Handle
    from raytrain_plus.observe.views.progress import ProgressView

_EPILOG = "Exit codes: 0 success, 1 failure (or a fault was found), 2 invalid input, 130 and 143 stopped by a signal."

_GROUPS = {
    "Begin": ("init", "new-job"),
    "Run a job": ("validate", "plan", "data", "run", "submit", "resume", "stop", "rescale"),
    "Watch a run": ("attach", "logs", "status", "export"),
    "Prove a result": ("audit", "verify"),
    "Environment": ("doctor", "install-horovod"),
}
"""The headings of `raytrain --help`, and their commands in order."""


class _Grouped(click.Group):
    """A group whose help lists its commands below the headings of `_GROUPS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, group by group."""
        width = max(map(len, self.commands))
        for heading, names in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(60)) for name in names])


@click.group(cls=_Grouped, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(VERSION, prog_name="raytrain")
def cli() -> None:
    """Elastic PyTorch training on Ray: training continues while machines join and leave."""


for _verb in (init, new_job, data, install_horovod):
    cli.add_command(_verb)

_job = click.argument("job")
_set = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a setting of the job file.")
_fresh = click.option("--fresh", is_flag=True, help="Move an earlier run of this name aside and start over.")
_detach = click.option("--detach", is_flag=True, help="Return once training has started; the run goes on by itself.")
_quiet = click.option("-q", "--quiet", is_flag=True, help="Print only the summary and errors.")


@cli.command()
@_job
@_set
@click.option("--address", help="Ray cluster to join. Default: RAY_ADDRESS, else a local Ray for this run.")
@_fresh
@_detach
@_quiet
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Kill a process on purpose, to see the run go on: 'kill controller at=WHEN' or 'kill worker at=WHEN', where "
    "WHEN is join, recovery, checkpoint, end or a number of steps.",
)
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    job: str,
    overrides: Sequence[str],
    address: str | None,
    fresh: bool,
    detach: bool,
    quiet: bool,
    faults: Sequence[str],
    as_json: bool,
    arguments: Sequence[str],
) -> int | Answer:
    """Run a job until it ends. JOB: path of the job file, or of a Trainer script, with its own ARGUMENTS after --.

    \b
    Examples:
      raytrain run jobs/digits.yaml
      raytrain run jobs/digits.yaml --set data.batch_size=192 --fresh
      raytrain run jobs/digits.yaml --address HOST:6379 --detach
      raytrain run train.py --set workers.max=3 -- --learning_rate 3e-5
    """
    if job.endswith(".py"):
        return _script(job, overrides, address, arguments, refused=fresh or detach or quiet or as_json or bool(faults))
    if arguments:
        raise click.UsageError("Only a script takes arguments of its own.")
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    from raytrain_plus.launch.runner import run as run_job
    from raytrain_plus.launch.runner import start

    view = view_of(as_json, quiet)
    if detach and faults:
        raise click.UsageError("--fault needs a run that is attached: leave --detach out.")
    if detach:
        return _began(start(loaded, address=address, fresh=fresh, roots=roots), view, as_json)
    from raytrain_plus.launch.fault import read_fault

    injected = [read_fault(fault) for fault in faults]
    result = run_job(loaded, address=address, fresh=fresh, view=view, quiet=as_json, roots=roots, faults=injected)
    return ended(result, as_json)


def _script(job: str, overrides: Sequence[str], address: str | None, arguments: Sequence[str], refused: bool) -> int:
    if refused:
        raise click.UsageError("A script takes --set, --address and its own arguments; the rest is for job files.")
    from raytrain_plus.bring.script import run_script

    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    run_script(Path(job), overrides, arguments)
    return 0


def _began(handle: Handle, view: ProgressView | None, as_json: bool) -> int | Answer:
    """Return the answer of a run that was started detached."""
    # The run had finished earlier, or ended right after it started.
    result = handle.ended or Result.load(open_folder(handle.path))
    if result is not None:
        if view is not None:
            view.finish(result)
        return ended(result, as_json)
    if as_json:
        return Answer(0, {"name": handle.name, "path": str(handle.path)})
    click.echo(f"{handle.name} runs detached; follow it with: raytrain attach '{handle.path}'")
    return 0


@cli.command()
@_job
@_set
@click.option("--address", help="Dashboard URL (http://HOST:8265). Default: RAY_ADDRESS, else this machine's.")
@_fresh
@click.option("-f", "--follow", is_flag=True, help="Print the run's output until it ends; exit with its exit code.")
@json_option
def submit(
    job: str, overrides: Sequence[str], address: str | None, fresh: bool, follow: bool, as_json: bool
) -> int | Answer:
    """Submit a job to a Ray cluster. JOB: path of the job file.

    The cluster works on a copy of the working directory, and the run continues in the background.
    """
    if follow and as_json:
        raise click.UsageError("--json and --follow cannot be combined.")
    return submit_run(job, overrides, address, fresh, follow, as_json)


_run = click.argument("run")
_storage = click.option(
    "--storage",
    default="runs",
    show_default=True,
    help="Folder of runs that are given by name: a path or an address.",
)


@cli.command()
@_run
@_storage
@_set
@click.option(
    "--address",
    help="Ray cluster to join, or dashboard URL (http://HOST:8265) to submit to. Default: RAY_ADDRESS, else a local "
    "Ray for this run.",
)
@click.option(
    "--fresh-rates",
    is_flag=True,
    help="Take learning rates and other settings of the optimizer from the task, not from the checkpoint.",
)
@_detach
@_quiet
@json_option
def resume(
    run: str,
    storage: str,
    overrides: Sequence[str],
    address: str | None,
    fresh_rates: bool,
    detach: bool,
    quiet: bool,
    as_json: bool,
) -> int | Answer:
    """Resume a run from its newest complete checkpoint. RUN: a folder, an address, or a name."""
    if is_dashboard(address):
        return submit_resume(str(address), run, storage, overrides, fresh_rates, as_json)
    from raytrain_plus.runs.folder import find_run

    folder = find_run(run, storage)
    from raytrain_plus.launch.runner import resume as resume_run
    from raytrain_plus.launch.runner import start_again

    if detach:
        began = start_again(folder.address, overrides, address=address, fresh_rates=fresh_rates)
        return _began(began, view_of(as_json, quiet), as_json)
    view = view_of(as_json, quiet)
    result = resume_run(folder.address, overrides, address=address, view=view, quiet=as_json, fresh_rates=fresh_rates)
    return ended(result, as_json)


_dashboard = click.option(
    "--address",
    help="Dashboard URL (http://HOST:8265): ask this cluster, not the storage. Default: the storage, or RAY_ADDRESS's "
    "dashboard if the storage has no such run.",
)


@cli.command()
@_run
@_storage
@_dashboard
@_quiet
@json_option
def attach(run: str, storage: str, address: str | None, quiet: bool, as_json: bool) -> int | Answer:
    """Follow a run until it ends. RUN: a folder, an address, or a name.

    Ctrl-C and SIGTERM stop only the following, not the run.
    """
    address = asked_cluster(run, storage, address)
    if address is not None:
        if as_json:
            raise click.UsageError("--json is not supported when attaching through a dashboard.")
        jobs = jobs_at(address)
        return watch_job(jobs, str(jobs.find(run).submission_id), run, address)
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import watch

    folder = find_run(run, storage)
    # A shell makes its background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = watch(folder, view_of(as_json, quiet))
    except (KeyboardInterrupt, SystemExit) as signalled:
        # The handler of SIGTERM raises `SystemExit`: see `main`.
        code = 130 if isinstance(signalled, KeyboardInterrupt) else signalled.code
        if code not in (130, 143):
            raise
        return _failed(f"the run continues; stop it with: raytrain stop '{folder.where}'", int(code))
    return ended(result, as_json)


@cli.command()
@_run
@_storage
@_dashboard
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the run has ended.")
def logs(run: str, storage: str, address: str | None, follow: bool) -> int:
    """Print the events of a run. RUN: a folder, an address, or a name."""
    address = asked_cluster(run, storage, address)
    if address is not None:
        jobs_at(address).print_output(run, sys.stdout, follow)
        return 0
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import print_events

    print_events(find_run(run, storage), sys.stdout, follow)
    return 0


@cli.command()
@_run
@_storage
@click.option("--address", help="Ray cluster or dashboard URL, if the run's own address cannot be reached from here.")
@click.option("--no-wait", is_flag=True, help="Return once the run has received the request.")
def stop(run: str, storage: str, address: str | None, no_wait: bool) -> int:
    """Stop a run at the next step boundary and save its state. RUN: a folder, an address, or a name."""
    address = asked_cluster(run, storage, address)
    if is_dashboard(address):
        click.echo(jobs_at(address).stop(run, wait=not no_wait))
        return 0
    from raytrain_plus.launch.control import send
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import watch

    folder = find_run(run, storage)
    send(folder, StopRequest(), address)
    if not no_wait:
        result = watch(folder, None)
        click.echo(f"{result.name}: {result.status} after {result.steps:,} step{'s' * (result.steps != 1)}")
        if saved := saved_text(result):
            click.echo(saved)
        if result.error:
            return _say(result.error, 1)
    return 0


@cli.command()
@_run
@_storage
@click.option("--min", "minimum", type=click.IntRange(1), help="Minimum number of workers.")
@click.option("--max", "maximum", type=click.IntRange(1), help="Maximum number of workers.")
@click.option("--spares", type=click.IntRange(0), help="Number of spare workers.")
@click.option("--address", help="Ray cluster of the run, if the run's own address cannot be reached from here.")
def rescale(
    run: str, storage: str, minimum: int | None, maximum: int | None, spares: int | None, address: str | None
) -> int:
    """Change the number of workers of a run. RUN: a folder, an address, or a name."""
    if minimum is maximum is spares is None:
        raise click.UsageError("Set at least one of --min, --max and --spares.")
    from raytrain_plus.launch.control import send
    from raytrain_plus.runs.folder import find_run

    click.echo(send(find_run(run, storage), RescaleRequest(minimum, maximum, spares), address))
    return 0


@cli.command()
@click.argument("run", required=False)
@_storage
@_dashboard
@json_option
def status(run: str | None, storage: str, address: str | None, as_json: bool) -> int | Answer:
    """Show the state, steps and checkpoints of a run.

    RUN: a folder, an address, or a name. Without it, the runs in the storage are listed.
    """
    if run is None:
        if address is not None:
            raise click.UsageError("--address needs a run.")
        from raytrain_plus.runs.status import listed

        return reported(*listed(storage), 0, as_json)
    address = asked_cluster(run, storage, address)
    if address is not None:
        job = jobs_at(address).status(run)
        lines = [f"{run}: {job['state']} (job {job['job']})", f"  {job['newest']}"]
        return reported(job, lines, 0, as_json)
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.status import status

    found = status(find_run(run, storage))
    return reported(found.to_json(), found.lines(), 0, as_json)


@cli.command()
@_run
@_storage
@click.option("--to", required=True, type=click.Path(path_type=Path), help="The file, or the folder, to write.")
@click.option("--best", is_flag=True, help="The best checkpoint, by the metric of checkpoint.keep_best.")
@click.option("--step", type=click.IntRange(1), help="The checkpoint after this step, as `raytrain status` shows it.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "transformers", "adapter", "lightning", "torch-export"]),
    default="safetensors",
    show_default=True,
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16: weights rounded to bfloat16.",
)
def export(run: str, storage: str, to: Path, best: bool, step: int | None, kind: str, dtype: str) -> int:
    """Write the model of a run to a file or a folder.

    RUN: a folder, an address, or a name; or the folder of a checkpoint. Without --best and --step it is the newest.
    """
    from raytrain_plus.runs.export import Which, export_to

    which = Which(step=None if step is None else step - 1, best=best)
    click.echo(export_to(run, storage, to, kind, which, dtype))
    return 0


@cli.command()
@_job
@_set
@click.option("--cluster", help="File for `ray up` or KubeRay: check that the job's workers fit on its machines.")
@click.option("--no-run", is_flag=True, help="Do not prepare data and run the task on one batch.")
@json_option
def validate(job: str, overrides: Sequence[str], cluster: str | None, no_run: bool, as_json: bool) -> int | Answer:
    """Check a job and its data, and try its task on one batch. JOB: path of the job file."""
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    from raytrain_plus.checks.cluster_file import fit
    from raytrain_plus.checks.trial_process import trying_apart
    from raytrain_plus.checks.validate import validate_job

    found = None if cluster is None else fit(loaded, cluster)
    with nullcontext() if no_run else trying_apart(loaded, roots) as trying:
        report = validate_job(loaded, roots, trying)
    document, lines = report.to_json(), report.lines()
    if found is not None:
        document, lines = {**document, "cluster": found.to_json()}, [*lines, *found.lines()]
    return reported(document, lines, 0, as_json)


@cli.command()
@_job
@_set
@click.option("--cluster", help="File for `ray up` or KubeRay: plan for its machines. Default: this machine.")
@click.option(
    "--sizes", default="1..16", show_default=True, help="Numbers of workers: a range, or separated by commas."
)
@click.option("--memory", help="Memory of each worker, such as 80G. Default: what its machine has.")
@json_option
def plan(
    job: str, overrides: Sequence[str], cluster: str | None, sizes: str, memory: str | None, as_json: bool
) -> int | Answer:
    """Show the fastest settings that fit, for each size. JOB: path of the job file.

    The costs of the task's layers are measured on this machine. Only settings that do not change the result are chosen.
    """
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    from raytrain_plus.checks.planned import plan_job, read_memory, read_sizes

    workers = read_sizes(sizes, loaded)
    report = plan_job(loaded, roots, workers, cluster, None if memory is None else read_memory(memory))
    return reported(report.to_json(), report.lines(), 0, as_json)


@cli.command()
@_job
@_set
@click.option("--workers", default="1,2,4", show_default=True, help="Numbers of workers to compare.")
@click.option("--kill", "kills", default=0, help="Workers to kill in each run with more than one worker.")
@click.option("--kill-controller", "controllers", default=0, help="How often to kill the controller in each run.")
@click.option("--steps", default=20, show_default=True, help="Steps to run.")
@click.option("--address", help="Ray cluster to join. Default: RAY_ADDRESS, else a local Ray.")
@json_option
def verify(
    job: str,
    overrides: Sequence[str],
    workers: str,
    kills: int,
    controllers: int,
    steps: int,
    address: str | None,
    as_json: bool,
) -> int | Answer:
    """Compare results bit by bit across numbers of workers. JOB: path of the job file.

    It runs the first steps of the job on each number of workers; --kill also kills workers meanwhile, and
    --kill-controller the controller.
    """
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    sizes = [int(size) for size in workers.split(",") if size.strip().isdecimal()]
    if not sizes or len(sizes) != len(workers.split(",")) or min(kills, controllers) < 0 or steps < 1:
        raise click.UsageError(
            "--workers takes integers separated by commas, --kill and --kill-controller an integer of at least 0, "
            "--steps one of at least 1."
        )
    from raytrain_plus.launch.verify import verify as verify_job

    comparison = verify_job(
        loaded,
        sizes,
        kills=kills,
        controller_kills=controllers,
        steps=steps,
        address=address,
        roots=roots,
        tell=(lambda line: None) if as_json else (lambda line: click.echo(line, err=True)),
    )
    return reported(comparison.to_json(), comparison.lines(), 0 if comparison.agree else 1, as_json)


@cli.command()
@_run
@_storage
@json_option
def audit(run: str, storage: str, as_json: bool) -> int | Answer:
    """Check which rows a run used never, once, or repeatedly. RUN: a folder, an address, or a name."""
    from raytrain_plus.audit.audit import audit
    from raytrain_plus.runs.folder import find_run

    found = audit(find_run(run, storage).address)
    return reported(found.to_json(), found.lines(), 0 if found.clean else 1, as_json)


@cli.command()
@json_option
def doctor(as_json: bool) -> int | Answer:
    """Check the environment and suggest fixes."""
    from raytrain_plus.install.doctor import checks

    found = checks()
    document = {"checks": [{name: getattr(check, name) for name in check.__slots__} for check in found]}
    lines = [line for check in found for line in check.lines()]
    return reported(document, lines, int(any(check.status == "FAIL" for check in found)), as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `raytrain` and end the process with one of the exit codes listed in its help."""
    for stream in (sys.stdout, sys.stderr):
        # A run's messages may hold characters that this terminal lacks, or lone surrogates.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Effective until a run installs its own handler, and again afterwards.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(_answered(sys.argv[1:] if arguments is None else arguments))


def _answered(words: Sequence[str]) -> int:
    """Run a command, print its answer if JSON is requested, and return its exit code."""
    return answered(words, lambda: _guarded(lambda: cli.main(args=list(words), standalone_mode=False)))


def _guarded(call: Callable[[], Any]) -> Answer:
    """Run a command; print errors on stderr and turn them into exit codes."""
    try:
        ended = call()
    except InputError as error:
        return _failed(error, 2)
    except RaytrainError as error:
        return _failed(error, 1)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        context = error.ctx if isinstance(error, click.UsageError) else None
        verb = "raytrain" if context is None or context.parent is None else f"raytrain {context.info_name}"
        wrong = InputError(error.format_message(), where=verb, remedy=f"see {verb} --help")
        return _failed(wrong, 2, without_credentials(shown.getvalue().rstrip("\n")))
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", 130)
    except SystemExit as error:
        if error.code in (130, 143):
            return _failed("interrupted", int(error.code))
        return _failed(f"the process was ended by sys.exit({error.code!r})", 1)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)) is not None:
            return _failed(missing, 2)
        bug = InputError(
            f"{type(error).__name__}: {error}", where="raytrain_plus", remedy="report the traceback on standard error"
        )
        return _failed(bug, 1, bug_report(error))
    return ended if isinstance(ended, Answer) else Answer(ended if isinstance(ended, int) else 0)


def _failed(error: RaytrainError | str, code: int, shown: str | None = None) -> Answer:
    """Print an error on stderr, as `shown` if given, and return the answer for it."""
    _say(str(error) if shown is None else shown, code)
    return failure(error, code)


def _say(text: str, code: int) -> int:
    click.echo(text, err=True)
    return code
