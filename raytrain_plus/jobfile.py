"""Reads a job from YAML: strictly, with the place of every mistake, and all mistakes at once."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.errors import InputError, JobError
from raytrain_plus.job import Job, check_type, check_values, fields_of, flatten, nested

MOST_BYTES = 1 << 20
MOST_NODES = 10_000
MOST_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: `1e-3` is a number; `no`, `010` and `1:30` are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own name for it


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Job, tuple[Path, ...]]:
    """The job in a file, with `a.b=c` overrides applied, and the folders from which its task is imported.

    Raises `JobError` with every problem, each placed `file:line:column key`.
    """
    file = Path(path)
    return read_job(_text(file), str(file), file.stem, overrides), (file.absolute().parent,)


def read_job(text: str, where: str, name: str, overrides: Sequence[str] = ()) -> Job:
    """The job that `text` from `where` says, with overrides applied; its name where it has none is `name`.

    Raises `JobError` with every problem, each placed.
    """
    root = _parse(text, where)
    reading = _Reading(where)
    values = reading.mapping(root, "") if root is not None else {}
    for override in overrides:
        reading.override(values, override)
    values.setdefault("name", name)
    problems = reading.problems + _problems(values, reading.places, where)
    if problems:
        raise JobError(problems)
    job: Job = _build(Job, values)
    return job


def _text(file: Path) -> str:
    where = str(file)
    try:
        if file.is_dir():
            raise JobError([InputError("is a folder", where=where, expected="a job file, as in jobs/digits.yaml")])
        if file.stat().st_size > MOST_BYTES:
            raise JobError([InputError("is longer than 1 MB", where=where, expected="a job file")])
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, _names_beside(file), 1)
        remedy = f"did you mean {file.with_name(near[0])}?" if near else ""
        raise JobError([InputError("there is no such file", where=where, remedy=remedy)]) from None
    except UnicodeDecodeError:
        raise JobError([InputError("is no text", where=where, expected="a job file in YAML")]) from None
    except OSError as error:
        raise JobError([InputError(f"cannot be read: {error.strerror}", where=where)]) from None
    return text


def _names_beside(file: Path) -> list[str]:
    return [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []


def _parse(text: str, where: str) -> yaml.MappingNode | None:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise JobError([InputError(f"is not YAML: {error.problem or error.context}", where=place)]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobError([InputError(f"is not YAML: {str(error).splitlines()[0]}", where=where)]) from None
    if node is None:
        raise JobError([InputError("is empty", where=where, expected="a job; jobs/digits.yaml is a short one")])
    if not isinstance(node, yaml.MappingNode):
        raise JobError([InputError("holds no settings", where=where, expected="lines of the form `key: value`")])
    return node


class _Reading:
    """Turns YAML nodes into plain values, and notes where each key stands and what is wrong."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, str] = {}
        self.problems: list[InputError] = []
        self._nodes = 0

    def mapping(self, node: yaml.MappingNode, prefix: str, depth: int = 0) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, prefix.rstrip("."), depth + 1)
            dotted = f"{prefix}{key}"
            place = f"{self.file}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1} {dotted}"
            if not isinstance(key, str):
                self.problems.append(InputError(f"the key {key!r} is no word", where=place))
                continue
            if key in values:
                first = self.places.get(dotted, "").split(" ")[0].split(":")[-2:-1]
                line = f"line {first[0]}" if first else "above"
                self.problems.append(InputError(f"is given twice, first in {line}", where=place, remedy="remove one"))
                continue
            self.places[dotted] = place
            values[key] = self.value(value_node, dotted, depth + 1)
        return values

    def value(self, node: yaml.Node, dotted: str, depth: int = 0) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES or depth > MOST_DEPTH:
            raise JobError([InputError("is too large or too deep for a job", where=self.file)])
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, f"{dotted}.", depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(entry, dotted, depth + 1) for entry in node.value]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, dotted)

    def _scalar(self, node: yaml.ScalarNode, dotted: str) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = str(node.value)
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        if kind == "int" and len(text) < 100:
            return int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if kind != "str":
            place = f"{self.file}:{node.start_mark.line + 1}:{node.start_mark.column + 1} {dotted}"
            self.problems.append(InputError(f"the tag {node.tag} is not allowed", where=place, expected="plain values"))
        return text

    def override(self, values: dict[str, Any], text: str) -> None:
        """Applies one `a.b=c`."""
        key, equals, spelled = text.partition("=")
        where = f"--set {text}"
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key):
            self.problems.append(
                InputError("is no override", where=where, expected="key=value, as in data.batch_size=128")
            )
            return
        try:
            node = yaml.compose(spelled, Loader=_Loader)
        except yaml.YAMLError:
            node = yaml.ScalarNode("tag:yaml.org,2002:str", spelled)
        inner = _Reading(where)
        value = None if node is None else inner.value(node, key)
        self.problems += inner.problems
        *groups, last = key.split(".")
        for group in groups:
            entry = values.setdefault(group, {})
            if not isinstance(entry, dict):
                entry = values[group] = {}
            values = entry
        values[last] = value
        for known in [known for known in self.places if known == key or known.startswith(f"{key}.")]:
            del self.places[known]
        self.places[key] = where


def _problems(values: Mapping[str, Any], places: Mapping[str, str], file: str) -> list[InputError]:
    """Unknown and missing keys, wrong types, and values that do not fit together."""
    good: dict[str, Any] = {}
    problems = list(_check_level(Job, values, "", good))
    problems += check_values(good)
    return [
        InputError(problem.what, _place(problem.where, places, file), problem.expected, problem.remedy)
        for problem in problems
    ]


def _place(key: str, places: Mapping[str, str], file: str) -> str:
    """Where a key stands; where it is not given, the nearest group above it."""
    if key in places:
        return places[key]
    above = key.rpartition(".")[0]
    while above and above not in places:
        above = above.rpartition(".")[0]
    return f"{places[above].rpartition(' ')[0]} {key}" if above and " " in places[above] else f"{file} {key}"


def _check_level(cls: type, values: Mapping[str, Any], prefix: str, good: dict[str, Any]) -> Iterator[InputError]:
    known = fields_of(cls)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            yield InputError(
                "there is no such setting",
                where=f"{prefix}{key}",
                expected=f"one of {', '.join(known)}",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )
    for name, (hint, required) in known.items():
        key = f"{prefix}{name}"
        group = nested(hint)
        if name not in values:
            if required:
                yield InputError("is missing", where=key, expected=_meaning(cls, name))
            elif group is None:
                good[key] = _default(cls, name)
            elif (default := _default(cls, name)) is not None:
                good.update(flatten(default, f"{key}."))
        elif group is not None and isinstance(values[name], Mapping):
            yield from _check_level(group, values[name], f"{key}.", good)
        else:
            problem = check_type(key, values[name])
            if problem is not None:
                yield problem
            else:
                good[key] = values[name]


def _default(cls: type, name: str) -> Any:
    entry = next(entry for entry in dataclasses.fields(cls) if entry.name == name)
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _meaning(cls: type, name: str) -> str:
    return {"path": "a Parquet file or a folder of them", "task": "module:Class"}.get(name, f"a value for `{name}`")


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    """The dataclass for checked values."""
    known = fields_of(cls)
    return cls(
        **{
            name: _build(group, value)
            if (group := nested(known[name][0])) is not None and isinstance(value, Mapping)
            else value
            for name, value in values.items()
        }
    )
