"""Read a job from YAML, strictly: report all mistakes at once, each with its place."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.errors import InputError, JobError, first_line
from raytrain_plus.job.setting_types import flatten, settings_of
from raytrain_plus.job.settings import Job, check_type, check_value
from raytrain_plus.job.value_checks import check_values

MOST_BYTES = 1 << 20
MOST_NODES = 10_000
MOST_DEPTH = 32
MOST_DIGITS = 100
MOST_SHOWN = 200
"""Maximum characters of an override that an error repeats."""
TOO_LARGE = f"it has more than {MOST_NODES:,} values or is nested more than {MOST_DEPTH} levels deep"


class _TooLarge(yaml.MarkedYAMLError):
    """A document has more nodes, or is nested deeper, than any valid job."""


class _Loader(yaml.SafeLoader):
    """Loader with YAML 1.2's plain scalars: `1e-3` is a number; `no`, `010` and `1:30` are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own name for it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node and what it contains. Raises `_TooLarge`."""
        self._nodes += 1
        event = self.peek_event()
        if self._nodes > MOST_NODES or self._depth > MOST_DEPTH:
            raise _TooLarge(problem=TOO_LARGE, problem_mark=event.start_mark)
        if getattr(event, "tag", None) == "!":
            # In YAML this tag turns what follows into text; PyYAML ignores it.
            raise yaml.MarkedYAMLError(problem="the tag ! is not allowed", problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), "true or false"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], "null or an empty value"),
    "int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789"), "digits, without a leading 0"),
    "float": (
        r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
        "a number, such as 0.5 or 1e-3",
    ),
}
"""Scalars that are not text: kind -> (pattern, possible first characters, description)."""
for _kind, (_pattern, _first, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"^(?:{_pattern})$"), _first)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Job, tuple[Path, ...]]:
    """Return the job in a file with `a.b=c` overrides applied, and the folders to import its task from.

    Raises `JobError` with every problem, each with its place as `file:line:column key`.
    """
    file = Path(path)
    return read_job(_text(file), str(file), file.stem, overrides), (file.absolute().parent,)


def read_job(text: str, where: str, name: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job in `text`, which was read from `where`, with overrides applied. `name` is its default name.

    Raises `JobError` with every problem, each with its place.
    """
    root = _parse(text, where)
    reading = _YamlReader(where)
    values = reading.mapping(root, "") if root is not None else {}
    in_file = dict(values)
    for override in overrides:
        reading.override(values, override)
    _replace_length(in_file, values, {override.partition("=")[0] for override in overrides})
    values.setdefault("name", name)
    problems = reading.problems + _problems(values, reading.places, where)
    if problems:
        raise JobError(problems)
    job: Job = _build(Job, values)
    return job


def _replace_length(in_file: Mapping[str, Any], values: dict[str, Any], overridden: Collection[str]) -> None:
    """Drop a length that the file gives in the other unit than an override; a job has one of `steps` and `epochs`."""
    for old, new in (("steps", "epochs"), ("epochs", "steps")):
        given = in_file.get(old)
        if given is None or old in overridden:
            continue
        if in_file.get(new) is None and values.get(new) is not None:
            print(f"--set {new}={values[new]} replaces {old}: {given}", file=sys.stderr)
            del values[old]


def _text(file: Path) -> str:
    where = str(file)
    try:
        if file.is_dir():
            raise JobError([InputError("is a folder", where=where, expected="a job file such as jobs/digits.yaml")])
        if file.stat().st_size > MOST_BYTES:
            raise JobError([InputError("is larger than 1 MB", where=where, expected="a job file")])
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, _names_beside(file), 1)
        remedy = f"did you mean {file.with_name(near[0])}?" if near else ""
        raise JobError([InputError("file not found", where=where, remedy=remedy)]) from None
    except UnicodeDecodeError:
        raise JobError([InputError("is not UTF-8 text", where=where, expected="a job file in YAML")]) from None
    except OSError as error:
        raise JobError([InputError(f"cannot be read: {error.strerror}", where=where)]) from None
    return text


def _names_beside(file: Path) -> list[str]:
    return [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []


def _parse(text: str, where: str) -> yaml.MappingNode | None:
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        raise JobError([_no_yaml(error, where)]) from None
    if node is None:
        raise JobError([InputError("is empty", where=where, expected="a job such as jobs/digits.yaml")])
    if not isinstance(node, yaml.MappingNode):
        raise JobError([InputError("contains no settings", where=where, expected="lines of the form `key: value`")])
    return node


def _compose(text: str) -> yaml.Node | None:
    """Compose the nodes of a document. Raises `yaml.YAMLError`."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except (ValueError, OverflowError) as error:
        # An escape such as "\\U00110000" is beyond the last character.
        raise yaml.YAMLError(f"an escape is not a valid character: {error}") from None


def _no_yaml(error: yaml.YAMLError, where: str) -> InputError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return InputError(f"is not valid YAML: {first_line(error)}", where=where)
    mark = error.problem_mark or error.context_mark
    place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
    if isinstance(error, _TooLarge):
        return InputError(f"is too large for a job: {error.problem}", where=place)
    problem = error.problem or error.context
    if problem is not None and "'\\t'" in problem:
        return InputError("a tab indents this line", where=place, expected="spaces, as in all YAML")
    return InputError(f"is not valid YAML: {problem}", where=place)


def value_of(text: str, key: str) -> Any:
    """Return the value that a job file has of this text, for a setting.

    Raises `yaml.YAMLError` if it is not YAML, and `JobError` if a job does not hold such a value.
    """
    value, problems = _read_value(text, key, f"--set {key}")
    if problems:
        raise JobError(problems)
    return value


def _read_value(text: str, key: str, where: str) -> tuple[Any, list[InputError]]:
    node, reading = _compose(text), _YamlReader(where)
    return (None if node is None else reading.value(node, key)), reading.problems


class _YamlReader:
    """Turn YAML nodes into plain values; record the place of each key, and the problems found."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, str] = {}
        self.problems: list[InputError] = []
        self._nodes = 0

    def mapping(self, node: yaml.MappingNode, prefix: str, depth: int = 0) -> dict[str, Any]:
        self._check_tag(node, "map", prefix.rstrip("."))
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, prefix.rstrip("."), depth + 1)
            dotted = f"{prefix}{key}"
            place = f"{self.file}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1} {dotted}"
            if not isinstance(key, str):
                self.problems.append(InputError(f"the key {key!r} is not a string", where=place))
                continue
            if key == "<<":
                what = "merge keys are not supported"
                self.problems.append(InputError(what, where=place, remedy="write the settings out, or use *alias"))
                continue
            if key in values:
                first = self.places.get(dotted, "").split(" ")[0].split(":")[-2:-1]
                line = f"on line {first[0]}" if first else "above"
                self.problems.append(InputError(f"is given twice, first {line}", where=place, remedy="remove one"))
                continue
            self.places[dotted] = place
            values[key] = self.value(value_node, dotted, depth + 1)
        return values

    def value(self, node: yaml.Node, dotted: str, depth: int = 0) -> Any:
        self._nodes += 1
        # Aliases turn a few nodes into many.
        if self._nodes > MOST_NODES or depth > MOST_DEPTH:
            raise JobError([InputError(f"is too large for a job: {TOO_LARGE}", where=self.file)])
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, f"{dotted}.", depth)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq", dotted)
            return [self.value(entry, dotted, depth + 1) for entry in node.value]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, dotted)

    def _scalar(self, node: yaml.ScalarNode, dotted: str) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        if kind in _SCALARS:
            pattern, _, spelled = _SCALARS[kind]
            if not re.fullmatch(pattern, text) and not (kind == "float" and re.fullmatch(_SCALARS["int"][0], text)):
                self._problem(f"{text[:50]!r} does not match its tag !!{kind}", node, dotted, spelled)
                return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        if kind == "int":
            if len(text) <= MOST_DIGITS:
                return int(text)
            self._problem("the number is too long", node, dotted, f"at most {MOST_DIGITS} digits")
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if kind not in _SCALARS:
            self._check_tag(node, "str", dotted)
        if re.search("[\ud800-\udfff]", text):
            self._problem("the text is not UTF-8, or holds half of a surrogate pair", node, dotted)
        return text

    def _check_tag(self, node: yaml.Node, kind: str, dotted: str) -> None:
        if node.tag != f"{_TAG}{kind}":
            self._problem(f"the tag {node.tag} is not allowed", node, dotted, "plain values")

    def _problem(self, what: str, node: yaml.Node, dotted: str, expected: str = "") -> None:
        place = f"{self.file}:{node.start_mark.line + 1}:{node.start_mark.column + 1} {dotted}"
        self.problems.append(InputError(what, where=place, expected=expected))

    def override(self, values: dict[str, Any], text: str) -> None:
        """Apply one `a.b=c` override to `values`."""
        key, equals, spelled = text.partition("=")
        where = f"--set {text}" if len(text) <= MOST_SHOWN else f"--set {text[:MOST_SHOWN]}..."
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", key):
            self.problems.append(
                InputError("is not an override", where=where, expected="key=value, such as data.batch_size=128")
            )
            return
        try:
            value, problems = _read_value(spelled, key, where)
        except _TooLarge as error:
            self.problems.append(_no_yaml(error, f"--set {key}"))
            return
        except yaml.YAMLError:
            mark = yaml.Mark("--set", 0, 0, 0, "", 0)
            inner = _YamlReader(where)
            value, problems = inner.value(yaml.ScalarNode(f"{_TAG}str", spelled, mark, mark), key), inner.problems
        self.problems += problems
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
    """Return unknown and missing keys, wrong types, and values that contradict each other."""
    good: dict[str, Any] = {}
    problems = list(_check_level(Job, values, "", good))
    problems += check_values(good)
    return [
        InputError(problem.what, _place(problem.where, places, file), problem.expected, problem.remedy)
        for problem in problems
    ]


def _place(key: str, places: Mapping[str, str], file: str) -> str:
    """Return the place of a key, or of the nearest group above it if it is not given."""
    if key in places:
        return places[key]
    above = key.rpartition(".")[0]
    while above and above not in places:
        above = above.rpartition(".")[0]
    return f"{places[above].rpartition(' ')[0]} {key}" if above and " " in places[above] else f"{file} {key}"


def _check_level(cls: type, values: Mapping[str, Any], prefix: str, good: dict[str, Any]) -> Iterator[InputError]:
    known = settings_of(cls)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            yield InputError(
                "unknown setting",
                where=f"{prefix}{key}",
                expected=f"one of {', '.join(known)}",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )
    for name, setting in known.items():
        key, group = f"{prefix}{name}", setting.group
        if name not in values:
            if setting.required:
                yield InputError("is missing", where=key, expected=_meaning(name))
            elif group is None:
                good[key] = setting.default
            elif setting.default is not None:
                good.update(flatten(setting.default, f"{key}."))
        elif group is not None and isinstance(values[name], Mapping):
            yield from _check_level(group, values[name], f"{key}.", good)
        else:
            wrong = check_type(key, values[name])
            if wrong is not None:
                yield wrong
            else:
                yield from check_value(key, values[name])
                good[key] = values[name]


def _meaning(name: str) -> str:
    known = {"path": "a Parquet file, a folder of them, or a pattern", "task": "module:Class"}
    return known.get(name, f"a value for `{name}`")


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    """Return the dataclass for checked values."""
    known = settings_of(cls)
    return cls(
        **{
            name: _build(group, value)
            if (group := known[name].group) is not None and isinstance(value, Mapping)
            else value
            for name, value in values.items()
        }
    )
