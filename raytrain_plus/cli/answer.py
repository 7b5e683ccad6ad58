"""How a command answers: the view of a run, or with `--json` one JSON object, whatever its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from raytrain_plus.errors import InputError, JobError, RaytrainError, first_line
from raytrain_plus.result import Result
from raytrain_plus.storage.json_text import json_text

if TYPE_CHECKING:
    from raytrain_plus.observe.views.progress import ProgressView

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on stdout."
)

_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_COMMAND = re.compile(r"; ((?:resume with|follow it again with|see): [^\n]+)$")
"""How an error's text ends that names a command as its remedy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended: its exit code, and what it prints with `--json`."""

    code: int
    document: Mapping[str, Any] | None = None


def view_of(as_json: bool, quiet: bool) -> ProgressView | None:
    """Return what shows a run to the user; None if JSON is requested."""
    if as_json:
        return None
    from raytrain_plus.observe.views.progress import view_for

    return view_for(sys.stdout, quiet=quiet)


def answer_of(result: Result) -> Answer:
    """Return the answer for a run that has ended: its result, with the error as an object."""
    error = None
    if result.error:
        error = error_fields(result.error)
        error["where"] = error["where"] or str(result.path)
    return Answer(result.exit_code, {**result.to_json(), "error": error})


def ended(result: Result, as_json: bool) -> int | Answer:
    """Return the answer for a run that has ended. A view has shown its result already, unless JSON is requested."""
    if not as_json:
        return result.exit_code
    if result.error:
        print(result.error, file=sys.stderr)
    return answer_of(result)


def reported(document: Mapping[str, Any], lines: Sequence[str], code: int, as_json: bool) -> int | Answer:
    """Return the answer of a command that reports something; print the lines unless JSON is requested."""
    if as_json:
        return Answer(code, document)
    click.echo("\n".join(lines))
    return code


def failure(error: RaytrainError | str, code: int) -> Answer:
    """Return the answer of a command that has no result to print."""
    status = {1: "failed", 2: "invalid"}.get(code, "interrupted")
    return Answer(code, {"status": status, "error": error_fields(error)})


def error_fields(error: RaytrainError | str) -> dict[str, str]:
    """Return an error, or the text of one, as `what` is wrong, `where`, and the `remedy`; unknown parts are empty."""
    if isinstance(error, JobError) and len(error.problems) > 1:
        parts = [error_fields(problem) for problem in error.problems]
        return {
            "what": "; ".join(f"{part['where']}: {part['what']}" if part["where"] else part["what"] for part in parts),
            "where": "; ".join(dict.fromkeys(part["where"] for part in parts if part["where"])),
            "remedy": "; ".join(dict.fromkeys(part["remedy"] for part in parts if part["remedy"])),
        }
    if isinstance(error, InputError):
        what = f"{error.what}; expected: {error.expected}" if error.expected else error.what
        return {"what": what, "where": error.where, "remedy": error.remedy}
    # The traceback of a bug follows its message.
    text = str(error).partition("\nTraceback (most recent call last):")[0]
    text, where = _without_frames(text)
    text, _, remedy = text.partition("\n  fix: ")
    text = text.replace("\n  expected: ", "; expected: ")
    if not remedy and (command := _COMMAND.search(text)):
        text, remedy = text[: command.start()], command[1]
    return {"what": text, "where": where, "remedy": remedy}


def _without_frames(text: str) -> tuple[str, str]:
    """Return an error's text without the user's frames and exception before it, and the place of the last frame."""
    frames = list(_FRAME.finditer(text)) if text.startswith(("Traceback (", '  File "')) else []
    if not frames:
        return text, ""
    last = frames[-1]
    raised, *lines = [line for line in text[last.end() :].splitlines()[1:] if not line.startswith("    ")] or [text]
    # A message of several lines comes twice: after the frames, and in the sentence about it.
    first = next((number for number, line in enumerate(lines) if raised in line), 0)
    return "\n".join(lines[first:]) or raised, f"{last[1]}, line {last[2]}"


def answered(words: Sequence[str], call: Callable[[], Answer]) -> int:
    """Call the command with these words, print its answer if JSON is requested, and return its exit code."""
    if not wants_json(words):
        return call().code
    try:
        with stdout_apart() as stream:
            answer = call()
            if answer.document is not None:
                print_document(answer.document, stream)
    except OSError as error:
        click.echo(f"standard output cannot be written: {first_line(error)}", err=True)
        return 1
    return answer.code


def wants_json(words: Sequence[str]) -> bool:
    """Return whether `--json` is among the words of a command line that does not ask for help.

    The command may not know the option: this error is printed as JSON, too.
    """
    options = set(words[: words.index("--")] if "--" in words else words)
    return "--json" in options and not options & {"-h", "--help"}


def print_document(document: Mapping[str, Any], stream: TextIO) -> None:
    """Write an answer's object as one line."""
    print(json_text(document), file=stream, flush=True)


@contextlib.contextmanager
def stdout_apart() -> Iterator[TextIO]:
    """Yield a stream to the standard output; what anything else prints there goes to standard error meanwhile.

    A task, a library or a process that this one starts may print whatever it wants.
    """
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            number, other = stdout.fileno(), sys.stderr.fileno()
        except (OSError, AttributeError):
            # A stream in memory, without a file below it; or None, for one that is closed.
            yield stdout
            return
        stdout.flush()
        kept = os.dup(number)
        try:
            os.dup2(other, number)
            with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
                yield stream
        finally:
            os.dup2(kept, number)
            os.close(kept)
