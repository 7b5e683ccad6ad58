"""The commands of the first minutes: a new folder with a task, a job for an existing task, its data, and Horovod."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from raytrain_plus.begin.catalogue import TEMPLATES
from raytrain_plus.cli.answer import Answer, json_option, reported


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--template", type=click.Choice(list(TEMPLATES)), default="digits", show_default=True)
def init(folder: Path, template: str) -> int:
    """Write a task, its job and a test into a new folder.

    \b
    Examples:
      raytrain init first
      raytrain init first --template transformers
    """
    from raytrain_plus.begin.write import write_template

    click.echo("\n".join(write_template(template, folder)))
    return 0


@click.command("new-job")
@click.argument("task", metavar="MODULE:CLASS")
@click.option("--data", metavar="PATH", help="File, folder or pattern of the rows: gives the sizes, if it can be read.")
@click.option("--to", type=click.Path(path_type=Path), help="The file to write. Default: NAME.yaml, from the class.")
def new_job(task: str, data: str | None, to: Path | None) -> int:
    """Write a job file for a task that you have."""
    from raytrain_plus.begin.write import write_job

    click.echo("\n".join(write_job(task, data, to)))
    return 0


@click.command()
@click.argument("job")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a setting of the job file.")
@json_option
def data(job: str, overrides: Sequence[str], as_json: bool) -> int | Answer:
    """Show what a run of a job would read: rows, columns, values. JOB: path of the job file."""
    from raytrain_plus.checks.data_report import data_report
    from raytrain_plus.job.yaml import load_job

    report = data_report(*load_job(job, overrides))
    return reported(report.to_json(), report.lines(), 0, as_json)


@click.command("install-horovod")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="Also copy the wheel to this folder.")
def install_horovod(to: Path | None) -> int:
    """Build, install and test Horovod for the installed torch."""
    from raytrain_plus.install.horovod import install_horovod

    wheel = install_horovod(lambda line: click.echo(line))
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        click.echo(f"copied to {shutil.copy(wheel, to)}")
    return 0
