"""The verbs of `raytrain`. Each loads what it needs itself, so that `raytrain --help` is quick."""

from __future__ import annotations

import io
import platform
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import InputError, RaytrainError
from raytrain_plus.install.missing_package import lacking
from raytrain_plus.launch.ray_address import dashboard_of, is_dashboard, named_dashboard
from raytrain_plus.release import VERSION
from raytrain_plus.result import Result
from raytrain_plus.storage.address import is_address, split
from raytrain_plus.storage.json_text import json_text
from raytrain_plus.storage.open import open_folder

if TYPE_CHECKING:
    from raytrain_plus.launch.ray_jobs import Jobs

_EPILOG = "Exit codes: 0 done, 1 failed (or a fault was found), 2 the input is wrong, 130 and 143 stopped by a signal."


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(VERSION, prog_name="raytrain")
def cli() -> None:
    """Elastic PyTorch training on Ray: machines come and go, the training does not notice."""


_job = click.argument("job")
_set = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a setting of the job file.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there.")


@cli.command()
@_job
@_set
@click.option("--address", help="Ray cluster to join; else RAY_ADDRESS, else one is started here for this run.")
@click.option("--fresh", is_flag=True, help="Move an earlier run of this name aside and start over.")
@click.option("--detach", is_flag=True, help="Return when it trains; it goes on by itself.")
@_json
def run(job: str, overrides: Sequence[str], address: str | None, fresh: bool, detach: bool, as_json: bool) -> int:
    """Run the job in the file JOB to its end."""
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    from raytrain_plus.launch.runner import run as run_job
    from raytrain_plus.launch.runner import start

    if detach:
        handle = start(loaded, address=address, fresh=fresh, roots=roots)
        ended = Result.load(open_folder(loaded.storage).inside(loaded.name))
        if as_json:
            click.echo(json_text({"name": handle.name, "path": str(handle.path)}))
        elif ended is not None:
            # Before this, or as soon as it had begun.
            from raytrain_plus.observe.progress import view_for

            view_for(sys.stdout).finish(ended)
            return ended.exit_code
        else:
            click.echo(f"{handle.name} goes on by itself; follow it with: raytrain attach '{handle.path}'")
        return 0
    result = run_job(loaded, address=address, fresh=fresh, quiet=as_json, roots=roots)
    return _ended(result, as_json)


@cli.command()
@_job
@_set
@click.option("--address", help="Of the cluster's dashboard: http://HOST:8265; else RAY_ADDRESS, else this machine's.")
@click.option("--fresh", is_flag=True, help="Move an earlier run of this name aside and start over.")
@click.option("-f", "--follow", is_flag=True, help="Show what it prints until it has ended, and end as it does.")
@_json
def submit(job: str, overrides: Sequence[str], address: str | None, fresh: bool, follow: bool, as_json: bool) -> int:
    """Have a cluster run the job in the file JOB, on a copy of this folder; it goes on by itself."""
    if follow and as_json:
        raise click.UsageError("--json tells that it was sent, and --follow what it prints: say one of them")
    from raytrain_plus.job.yaml import load_job

    loaded, _ = load_job(job, overrides)
    from raytrain_plus.launch.ray_jobs import check_sendable, unneeded_by

    file = check_sendable(loaded, Path(job), Path.cwd())
    where = dashboard_of(address)
    settings = [word for override in overrides for word in ("--set", override)]
    words = ["run", file, *settings, *(["--fresh"] if fresh else [])]
    return _send(where, loaded.name, words, unneeded_by(loaded, Path.cwd()), follow, as_json)


_run = click.argument("run")
_storage = click.option(
    "--storage",
    default="runs",
    show_default=True,
    help="Where a run that is given by its name lies: a path or an address.",
)


@cli.command()
@_run
@_storage
@_set
@click.option("--address", help="Ray cluster to join; else RAY_ADDRESS, else one is started here. http://: it is sent.")
@_json
def resume(run: str, storage: str, overrides: Sequence[str], address: str | None, as_json: bool) -> int:
    """Go on with the run RUN (a folder, an address, or a name) from its newest complete checkpoint."""
    if is_dashboard(address):
        if not any(is_address(place) or Path(place).is_absolute() for place in (run, storage)):
            raise InputError(
                "runs are not sent along",
                where=f"storage: {storage}",
                expected="where the cluster's machines see it: --storage with an absolute path, or an address",
            )
        settings = [word for override in overrides for word in ("--set", override)]
        name = split(run)[1] if is_address(run) else Path(run).name
        from raytrain_plus.launch.ray_jobs import check_shown, unneeded_to_resume

        words = ["resume", run, "--storage", storage, *settings]
        check_shown(words)
        return _send(str(address), name, words, unneeded_to_resume(run, storage, Path.cwd()), False, as_json)
    from raytrain_plus.runs.folder import find_run

    folder = find_run(run, storage)
    from raytrain_plus.launch.runner import resume as resume_run

    result = resume_run(folder.address, overrides, address=address, quiet=as_json)
    return _ended(result, as_json)


_dashboard = click.option(
    "--address",
    help="Ask the cluster with this dashboard (http://HOST:8265), not the storage; else RAY_ADDRESS's, where the "
    "storage has no such run.",
)


@cli.command()
@_run
@_storage
@_dashboard
@_json
def attach(run: str, storage: str, address: str | None, as_json: bool) -> int:
    """Follow the run RUN (a folder, an address, or a name) to its end. Ctrl-C ends the watching, SIGTERM the run."""
    address = _asked(run, storage, address)
    if address is not None:
        if as_json:
            raise click.UsageError("of a cluster it is shown what the run prints: leave out --json")
        jobs = _jobs(address)
        return _watched(jobs, str(jobs.find(run).submission_id), run, address)
    from raytrain_plus.observe.progress import view_for
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import watch

    folder = find_run(run, storage)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    # A shell has what it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hand_on() -> None:
        if asked:
            asked.clear()
            from raytrain_plus.launch.control import stop

            try:
                stop(folder)
            except RaytrainError as error:
                # It may just have ended by itself.
                click.echo(str(error), err=True)

    try:
        result = watch(folder, None if as_json else view_for(sys.stdout), hand_on)
    except KeyboardInterrupt:
        return _say(f"the run goes on; stop it with: raytrain stop '{folder.where}'", 130)
    return _ended(result, as_json)


@cli.command()
@_run
@_storage
@_dashboard
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
def logs(run: str, storage: str, address: str | None, follow: bool) -> int:
    """Tell what has happened in the run RUN (a folder, an address, or a name)."""
    address = _asked(run, storage, address)
    if address is not None:
        _jobs(address).tell(run, sys.stdout, follow)
        return 0
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import tell

    tell(find_run(run, storage), sys.stdout, follow)
    return 0


@cli.command()
@_run
@_storage
@click.option("--address", help="Its Ray cluster, where the one that the run knows cannot be reached from here.")
@click.option("--no-wait", is_flag=True, help="Return when the run has heard.")
def stop(run: str, storage: str, address: str | None, no_wait: bool) -> int:
    """Stop the run RUN (a folder, an address, or a name) at the next step boundary; its state is saved."""
    address = _asked(run, storage, address)
    if is_dashboard(address):
        click.echo(_jobs(address).stop(run, wait=not no_wait))
        return 0
    from raytrain_plus.launch.control import stop as stop_run
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.follow import watch

    folder = find_run(run, storage)
    stop_run(folder, address)
    if not no_wait:
        result = watch(folder, None)
        click.echo(f"{result.name}: {result.status} after {result.steps:,} steps")
        if result.error:
            return _say(result.error, 1)
    return 0


@cli.command()
@_run
@_storage
@click.option("--min", "minimum", type=click.IntRange(1), help="The fewest workers.")
@click.option("--max", "maximum", type=click.IntRange(1), help="The most workers.")
@click.option("--spares", type=click.IntRange(0), help="Workers that stand by.")
@click.option("--address", help="Its Ray cluster, where the one that the run knows cannot be reached from here.")
def rescale(
    run: str, storage: str, minimum: int | None, maximum: int | None, spares: int | None, address: str | None
) -> int:
    """Have the run RUN (a folder, an address, or a name) go on with other numbers of workers."""
    if minimum is maximum is spares is None:
        raise click.UsageError("say at least one of --min, --max and --spares")
    from raytrain_plus.launch.control import rescale as rescale_run
    from raytrain_plus.runs.folder import find_run

    rescale_run(find_run(run, storage), minimum, maximum, spares, address)
    return 0


@cli.command()
@_run
@_storage
@_dashboard
@_json
def status(run: str, storage: str, address: str | None, as_json: bool) -> int:
    """Say how far the run RUN (a folder, an address, or a name) has come, and what checkpoints it has."""
    address = _asked(run, storage, address)
    if address is not None:
        told = _jobs(address).status(run)
        click.echo(json_text(told) if as_json else f"{run}: {told['state']} (job {told['job']})\n  {told['newest']}")
        return 0
    from raytrain_plus.runs.folder import find_run
    from raytrain_plus.runs.status import status

    found = status(find_run(run, storage))
    click.echo(json_text(found.to_json()) if as_json else "\n".join(found.lines()))
    return 0


@cli.command()
@_run
@_storage
@click.option("--to", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--format", "kind", type=click.Choice(["safetensors", "torch-export"]), default="safetensors", show_default=True
)
def export(run: str, storage: str, to: Path, kind: str) -> int:
    """Write the newest model of the run RUN (a folder, an address, or a name) to a file."""
    from raytrain_plus.runs.export import export_program, export_weights
    from raytrain_plus.runs.folder import find_run

    folder = find_run(run, storage)
    manifest = export_weights(folder, to) if kind == "safetensors" else export_program(folder, to, [Path.cwd()])
    click.echo(f"{to}: the model after step {manifest.step + 1} of {split(folder.address)[1]}")
    return 0


@cli.command()
@_job
@_set
@click.option("--cluster", help="A file for `ray up`, or KubeRay's: whether the job's workers fit its machines.")
@_json
def validate(job: str, overrides: Sequence[str], cluster: str | None, as_json: bool) -> int:
    """Check the job in the file JOB, its task and its data, without running it."""
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    from raytrain_plus.checks.cluster_file import fit
    from raytrain_plus.checks.validate import validate_job

    found = None if cluster is None else fit(loaded, cluster)
    report = validate_job(loaded, roots)
    if as_json:
        click.echo(json_text({**report.to_json(), **({} if found is None else {"cluster": found.to_json()})}))
    else:
        click.echo("\n".join([*report.lines(), *(() if found is None else found.lines())]))
    return 0


@cli.command()
@_job
@_set
@click.option("--workers", default="1,2,4", show_default=True, help="Numbers of workers to compare.")
@click.option("--kill", "kills", default=0, help="Workers to kill in each run that has more than one.")
@click.option("--steps", default=20, show_default=True, help="Steps to make.")
@click.option("--address", help="Ray cluster to join; else RAY_ADDRESS, else one is started here.")
@_json
def verify(
    job: str, overrides: Sequence[str], workers: str, kills: int, steps: int, address: str | None, as_json: bool
) -> int:
    """Run the first steps of the job in the file JOB on several numbers of workers and compare every bit."""
    from raytrain_plus.job.yaml import load_job

    loaded, roots = load_job(job, overrides)
    sizes = [int(size) for size in workers.split(",") if size.strip().isdecimal()]
    if not sizes or len(sizes) != len(workers.split(",")) or kills < 0 or steps < 1:
        raise click.UsageError("--workers takes numbers with commas between them, --kill and --steps whole numbers")
    from raytrain_plus.launch.verify import verify as verify_job

    verdict = verify_job(
        loaded,
        sizes,
        kills=kills,
        steps=steps,
        address=address,
        roots=roots,
        tell=(lambda line: None) if as_json else (lambda line: click.echo(line, err=True)),
    )
    click.echo(json_text(verdict.to_json()) if as_json else "\n".join(verdict.lines()))
    return 0 if verdict.agree else 1


@cli.command()
@_run
@_storage
@_json
def audit(run: str, storage: str, as_json: bool) -> int:
    """Check which rows the run RUN (a folder, an address, or a name) used never, once, or more than once."""
    from raytrain_plus.data.audit import audit
    from raytrain_plus.runs.folder import find_run

    found = audit(find_run(run, storage).address)
    click.echo(json_text(found.to_json()) if as_json else "\n".join(found.lines()))
    return 0 if found.clean else 1


@cli.command()
@_json
def doctor(as_json: bool) -> int:
    """Say what is here, what is missing, and the command that mends it."""
    from raytrain_plus.install.doctor import checks

    found = checks()
    if as_json:
        click.echo(json_text({"checks": [{name: getattr(check, name) for name in check.__slots__} for check in found]}))
    else:
        for check in found:
            click.echo(f"{check.status}  {check.name}: {check.detail}")
            if check.remedy:
                click.echo(f"      mend it with: {check.remedy}")
    return int(any(check.status == "FAIL" for check in found))


@cli.command("install-horovod")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="Leave its wheel in this folder, too.")
def install_horovod(to: Path | None) -> int:
    """Build Horovod against the torch that is installed, install it, and prove that it works."""
    from raytrain_plus.install.horovod import install_horovod

    wheel = install_horovod(lambda line: click.echo(line))
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        click.echo(f"copied to {shutil.copy(wheel, to)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `raytrain`; ends the process with one of the exit codes that the help names."""
    for stream in (sys.stdout, sys.stderr):
        # A run's words may hold characters that this terminal has not, or that are half of one.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Until a run takes it, and afterwards.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(_guarded(lambda: cli.main(args=arguments and list(arguments), standalone_mode=False)))


def _guarded(call: Callable[[], Any]) -> int:
    """Runs a verb; errors become words on stderr and an exit code."""
    try:
        code = call()
    except InputError as error:
        return _say(str(error), 2)
    except RaytrainError as error:
        return _say(str(error), 1)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        return _say(without_credentials(shown.getvalue().rstrip("\n")), 2)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", 130)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (told := lacking(error)) is not None:
            return _say(str(told), 2)
        return _say(f"{without_credentials(traceback.format_exc())}\n{_report_request()}", 1)
    return code if isinstance(code, int) else 0


def _ended(result: Result, as_json: bool) -> int:
    """The exit code of a run that has ended. A view has told its result already, unless JSON is wanted."""
    if as_json:
        click.echo(json_text(result.to_json()))
        if result.error:
            click.echo(result.error, err=True)
    return result.exit_code


def _asked(run: str, storage: str, address: str | None) -> str | None:
    """The cluster to ask of a run: the one that is wanted; or, where the run is not in the storage as seen from here,
    the one whose dashboard the environment names. None where the run's folder is asked."""
    there = named_dashboard()
    if address is not None or there is None:
        return address
    from raytrain_plus.runs.folder import find_run

    try:
        find_run(run, storage)
    except InputError:
        click.echo(f"no run '{run}' is in {storage}: asking {there}", err=True)
        return there
    return None


def _jobs(address: str | None) -> Jobs:
    """The jobs of the cluster with this dashboard."""
    from raytrain_plus.launch.ray_jobs import Jobs

    return Jobs(dashboard_of(address))


def _send(address: str, run: str, words: Sequence[str], unneeded: Sequence[str], follow: bool, as_json: bool) -> int:
    """Has a cluster do what the words say of a run, on a copy of this folder; the exit code."""
    jobs = _jobs(address)
    job = jobs.submit(run, words, Path.cwd(), unneeded)
    if as_json:
        click.echo(json_text({"name": run, "job": job, "address": address}))
    else:
        click.echo(f"{run} was sent (job {job}); follow it with: raytrain attach {run} --address {address}")
    return _watched(jobs, job, run, address) if follow else 0


def _watched(jobs: Jobs, job: str, run: str, address: str) -> int:
    """Shows what a job prints, until it has ended; its exit code. SIGTERM stops it."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return jobs.watch(job, sys.stdout)
    except KeyboardInterrupt:
        return _say(f"the run goes on; stop it with: raytrain stop {run} --address {address}", 130)
    except SystemExit as error:
        click.echo(jobs.stop(job, wait=False), err=True)
        return int(str(error.code))


def _say(text: str, code: int) -> int:
    click.echo(text, err=True)
    return code


def _report_request() -> str:
    names = ("ray", "torch", "pyarrow")
    versions = ", ".join([f"raytrain-plus {VERSION}", *(f"{name} {version(name)}" for name in names)])
    return (
        "This is a fault of raytrain_plus, not of your job. Please report it with the lines above and these:\n"
        f"  Python {platform.python_version()} on {platform.platform()}; {versions}"
    )
