"""Generate broken and unusual job files, and compare accepted jobs with an independent reader, libyaml.

A file consists of some of a job's keys, whose values are snippets of YAML, some broken on purpose; then its text is
damaged a little. An accepted job must equal, key by key, what libyaml reads from the file and its `--set` options (the
platform uses PyYAML's own parser), and must load back equal from its own `job.yaml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.errors import RaytrainError
from raytrain_plus.job.setting_types import flatten, settings_of
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import load_job, read_job
from raytrain_plus.launch.preflight import order_of
from tests.unit.fuzz.tasks import prepare
from tests.unit.fuzz.verdict import Fault, limited, raytrain

TASK = "tests.unit.fuzz.tasks:Small"
GOOD = {
    "name": ["run", "a.b-c_d", "'1'", '"n"', "x" * 128],
    "task": [TASK, f"'{TASK}'"],
    "args": ["{}", "{width: 3}", "{a: {b: [1, 2.5, true, ~]}}", "{k: 'it''s'}", '{k: "\\t\\u00e9\\x41"}', "{'1': 1}"],
    "seed": ["0", "-1", "7", "18446744073709551616", "+3"],
    "data.path": ["data", "./data", "data/0.parquet", "'data'"],
    "data.mix": ["~", "[{path: data, weight: 3}, {path: ./data, weight: 1.5, format: ~}]"],
    "data.prepare": ["~", "tests.unit.fuzz.tasks:prepare"],
    "data.batch_size": ["16", "64"],
    "data.shards": ["8", "4", "1", "2"],
    "data.shuffle": ["none", "units", "rows", "'rows'"],
    "data.image_size": ["~"],
    "data.transform": ["null", "tests.unit.fuzz.tasks:same"],
    "data.on_error": ["skip", "stop"],
    "data.granule": ["1", "1024", "1000000000"],
    "data.cache_mb": ["0", "256"],
    "steps": ["1", "10", "1000000000"],
    "epochs": ["1", "3", "1000000"],
    "workers.min": ["1", "2"],
    "workers.max": ["~", "2", "8", "1000"],
    "workers.spares": ["0", "2"],
    "workers.cpus": ["1", "0.5", "0", "1e2", ".5"],
    "workers.gpus": ["0", "0.0"],
    "workers.threads": ["1", "4"],
    "parallel.pipeline": ["1", "2", "3"],
    "parallel.schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"],
    "parallel.commit_every": ["1", "16"],
    "parallel.microbatches": ["1", "2"],
    "collective": ["auto", "torch"],
    "reduction": ["ring", "exact"],
    "clip_norm": ["~", "1", "1e-3", "+1.5E+3", "1e308"],
    "elastic.hang_timeout_s": ["30", "0.5"],
    "elastic.max_failures": ["~", "0", "3"],
    "elastic.wait_s": ["60", "1e-9"],
    "elastic.copy_every": ["1", "5"],
    "elastic.stop_grace_s": ["3"],
    "checkpoint.every_steps": ["~", "1", "10"],
    "checkpoint.every_s": ["~", "600.0"],
    "checkpoint.keep": ["1", "3"],
    "checkpoint.keep_best.metric": ["loss"],
    "checkpoint.keep_best.mode": ["min", "max"],
    "early_stop.metric": ["loss"],
    "early_stop.mode": ["min", "max"],
    "early_stop.patience": ["1", "3"],
    "evaluate.path": ["data", "held_out"],
    "evaluate.every_steps": ["1", "5"],
    "profile.steps": ["[0, 1]"],
    "profile.workers": ["1", "2"],
    "trackers": ["[]"],
    "storage": ["runs", "./runs", "deep/er/runs"],
}
"""Valid values of each setting, taken alone."""
NEEDED = ("task", "data.path", "data.batch_size", "steps")
SELDOM = (
    "epochs",
    "data.mix",
    "workers.gpus",
    "parallel.pipeline",
    "parallel.schedule",
    "parallel.microbatches",
    "reduction",
)
"""Settings that exclude many others."""
TOGETHER = (
    ("checkpoint.keep_best.mode", "checkpoint.keep_best.metric", "evaluate.path"),
    ("early_stop.mode", "early_stop.metric", "early_stop.patience", "evaluate.path"),
    ("evaluate.path", "evaluate.every_steps"),
    ("profile.workers", "profile.steps"),
)
NUMBERS = [key for key, values in GOOD.items() if re.fullmatch("[0-9.e+]+", values[-1])]
SIZES = ["1000", "100000", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "1" + "0" * 30]
DEEP = 400


def _apart(text: str) -> list[str]:
    """Split a text at two or more spaces and at line ends."""
    return re.split(r"  +|\n\s*", text.strip())


SCALARS = _apart(r"""
    ''  ""  ~  null  true  False  yes  no  on  NaN  .nan  -.nan  .inf  -.inf  +.INF  2001-12-14  2001-12-14t21:59:43Z
    0  -0  1  -1  1.0  1e3  1e999  -1e999  1e-999  1_000  010  0x1f  0o17  0b1  1:30  1e  1.  .5  .  ..  -  +  --1  1-1
    1e18  1e308  2147483648  4294967296  9223372036854775807  9223372036854775808  -9223372036854775809
    'x'  'it''s'  "\0"  "\uD800"  "\uDFFF\uD800"  "\U00110000"  "\UFFFFFFFF"  "\x"  "\q"  "\u2028"  "a\nb"
    a: b  a #b  &x y  ! 5  %x  @x  `x`  !x  &  *  *x  [  ]  {  }  {]  [}  ,  ?  :  #  !!  <<  =
    /proc/nowhere  /dev/null  a/../b  a//b  \  C:\x  file:///nowhere/x  s3://  ftp://h/x  s3://k:s@b/x  nothing://x
    ://  s3:///  file://  module:Class  json:loads  os:  :x  tests.unit.fuzz  yaml:YAMLError  ${env:NO_SUCH}
    ${env:HOME}
    tests.unit.fuzz.tasks:explode  tests.unit.fuzz.tasks:Missing
    !!int abc  !!int ''  !!int 3.5  !!int 0x1f  !!int 1_0  !!int '7'  !!float x  !!float ''  !!float 3  !!float '1_0'
    !!float nan  !!float infinity  !!float .inf  !!bool maybe  !!bool yes  !!bool 'true'  !!null x  !!null ''
    !!str 5  !!str  !!binary aGk=  !!timestamp 2001-01-01  !!python/none x  !local x  !!set {a, b}  !!omap [a: 1]
    !!python/object/apply:os.system [x]  !<tag:yaml.org,2002:int> x  !!map {a: 1}  !!seq [a]  !!seq {a: 1}
    !!map [a]  !!str [a]  !!int {a: 1}  !x {a: 1}  !x [1]
""")
SCALARS += ["9" * 99, "9" * 100, "9" * 101, "9" * 5000, "x" * 300, "x" * 5000, "\u00e9" * 50]
SCALARS += ['"\\\n  x"', "'a\n\n  b'", "|\n  a", ">-\n  a", "\U0001f600", "\u202e", "\ufeff", "\u0085", "\u2028"]
_LAUGHS = [f"&{b} [{', '.join([f'*{a}'] * 8)}]" for a, b in zip("abcdef", "bcdefg", strict=True)]
COLLECTIONS = _apart(r"""
    []  {}  [a]  [1, 'b', ~]  {a: 1}  {1: 2}  {~: 1}  {true: 1}  {[a]: 1}  {{a: 1}: 1}  {a: 1, a: 2}  {'': 1}  {' ': 1}
    {'a.b': 1}  {<<: {a: 1}}  {<<: [{a: 1}], b: 2}  {a}  {a, b: }  [[[]]]  [,]  [a,,b]  &r [*r]  &r {a: *r}
    {a: &n 3, b: *n}  [&n {x: 1}, *n, *n]  {&n a: 1, b: *n}  {*nothing : 1}  {? [a, b] : c}
""")
COLLECTIONS += ["[" * DEEP, "[" * DEEP + "]" * DEEP, "{a: " * DEEP + "1" + "}" * DEEP]
COLLECTIONS += ["[" * 33 + "]" * 33, "{a: " * 30 + "1" + "}" * 30, "[" + "0, " * 12000 + "]"]
COLLECTIONS += [f"[&a [x, x, x, x, x, x, x, x], {', '.join(_LAUGHS)}]"]
KEYS = _apart("""
    -  steps  data  stepz  datapath  args.x  data.path  1  ~  <<  =  [a]  'data.path'  \u00e9
    'a b'  !!str seed  !!int seed  &k seed  ? seed
""")
KEYS += [""]
CHARACTERS = " \n\t\r:-#,[]{}'\"!&*%@`|>?\\\0\x07\u0085\u2028\ufeff\u00e9\U0001f600.0129eE+~=</"


@dataclass(frozen=True, slots=True)
class Made:
    """A job file and its `--set` overrides."""

    text: bytes
    overrides: tuple[str, ...]


def made(seed: int) -> Made:
    """Return the job of a seed."""
    draw = random.Random(seed)
    chosen = {key for key in GOOD if key in NEEDED or (draw.random() < 0.15 and key not in SELDOM)}
    chosen |= {key for key in SELDOM if draw.random() < 0.04}
    for together in TOGETHER:
        chosen |= set(together) if chosen & set(together) else set()
    if "data.mix" in chosen:
        chosen -= {"data.path", "data.format"}
    elif draw.random() < 0.2:
        chosen = chosen - {"steps"} | {"epochs"}
    keys = [key for key in GOOD if key in chosen]
    if draw.random() < 0.08:
        keys.remove(draw.choice(keys))
    values = {key: draw.choice(GOOD[key]) for key in keys}
    for _ in range(draw.choice([0, 0, 0, 0, 1, 1, 1, 2])):
        key = draw.choice(
            [*GOOD, *(f"{draw.choice(['', 'data.', 'args.', 'workers.'])}{draw.choice(KEYS)}" for _ in range(4))]
        )
        values[key] = draw.choice(SCALARS if draw.random() < 0.7 else COLLECTIONS)
    if draw.random() < 0.1:
        # Huge sizes that are consistent: no code may loop up to them.
        size = draw.choice(SIZES)
        values |= dict.fromkeys(draw.sample(NUMBERS, draw.choice([1, 1, 2, 4])), size)
        values |= dict.fromkeys(draw.choice([(), ("data.batch_size", "data.shards", "workers.max")]), size)
    text = _written(values, draw)
    for _ in range(draw.choice([0, 0, 0, 0, 0, 0, 1, 1, 2])):
        text = _scratched(text, draw)
    overrides = tuple(_override(draw) for _ in range(draw.choice([0, 0, 0, 0, 0, 0, 1, 2])))
    return Made(_encoded(text, draw), overrides)


def _written(values: Mapping[str, str], draw: random.Random) -> str:
    """Return the settings as YAML: groups in flow or block style, and sometimes an entry twice."""
    groups: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".") if re.fullmatch(r"[\w.]+", key) else [key]
        inner = groups
        for one in above:
            inner = inner.setdefault(one, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[last] = value
    entries = list(groups.items())
    if draw.random() < 0.08:
        entries.append(draw.choice(entries))
    draw.shuffle(entries)
    return "".join(_lines(key, value, draw, "") for key, value in entries)


def _lines(key: str, value: Any, draw: random.Random, indent: str) -> str:
    if not isinstance(value, dict):
        return f"{indent}{key}: {value.replace(chr(10), chr(10) + indent)}\n"
    if draw.random() < 0.5:
        return f"{indent}{key}: {_flow(value)}\n"
    inner = "".join(_lines(one, what, draw, indent + "  ") for one, what in value.items())
    return f"{indent}{key}:\n{inner}"


def _flow(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"


def _scratched(text: str, draw: random.Random) -> str:
    at, length = draw.randrange(len(text) + 1), draw.choice([1, 1, 2, 5, 20])
    kind = draw.randrange(6)
    if kind == 0:
        return text[:at] + "".join(draw.choices(CHARACTERS, k=length)) + text[at:]
    if kind == 1:
        return text[:at] + text[at + length :]
    if kind == 2:
        return text[:at] + text[at : at + length] * 2 + text[at + length :]
    lines = text.split("\n")
    line = draw.randrange(len(lines))
    if kind == 3:
        lines.insert(
            line,
            draw.choice(["---", "...", "%YAML 1.1", "%TAG ! x", "# x", "\t", "- a", "? a", ": b", "!!map", "&a", "x"]),
        )
    elif kind == 4:
        lines[line] = " " * draw.randrange(4) + lines[line].lstrip()
    else:
        lines[line] = lines[draw.randrange(len(lines))]
    return "\n".join(lines)


def _encoded(text: str, draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.95:
        return text.encode("utf-8", "surrogatepass")
    if kind < 0.97:
        raw = bytearray(text.encode())
        raw.insert(draw.randrange(len(raw) + 1), draw.choice([0, 0x80, 0xC0, 0xED, 0xFF]))
        return bytes(raw)
    return draw.choice(
        [
            text.encode("utf-16"),
            text.encode("utf-8-sig"),
            text.replace("\n", "\r\n").encode(),
            b"",
            bytes(100),
            text.encode()[:50],
        ]
    )


def _override(draw: random.Random) -> str:
    key = draw.choice([*GOOD, *KEYS, "args.a.b", "args", "data", "a..b", ".a", "a.", "a b", "steps ", "*", "args.0"])
    value = draw.choice(GOOD[key]) if key in GOOD and draw.random() < 0.4 else draw.choice(SCALARS + COLLECTIONS)
    return draw.choice([f"{key}={value}"] * 8 + [key, f"{key}:{value}", f"{key} = {value}", "=", ""])


# The content of a file, read by libyaml.


class Unclear(Exception):
    """libyaml cannot read the file, or the file contains something that no job may contain."""


_CORE = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    # Documented: spellings of octal or base-60 numbers are text.
    (re.compile(r"[-+]?(0|[1-9][0-9]*)"), int),
    (re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)
_TAGS = {"null": _CORE[:1], "bool": _CORE[1:3], "int": _CORE[3:4], "float": _CORE[3:]}


def spoken(text: str) -> Any:
    """Return a document's value in YAML's core schema.

    Raises `Unclear` for other tags, and for keys that are not text or are repeated.
    """
    try:
        events = iter(list(yaml.parse(text, Loader=yaml.CSafeLoader)))
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        raise Unclear(str(error)) from None
    known: dict[str, Any] = {}
    values = [_value(event, events, known) for event in events if isinstance(event, yaml.NodeEvent)]
    if len(values) != 1:
        raise Unclear(f"{len(values)} documents")
    return values[0]


def _value(event: yaml.Event, events: Iterator[yaml.Event], known: dict[str, Any]) -> Any:
    if isinstance(event, yaml.AliasEvent):
        if event.anchor not in known:
            raise Unclear("an alias of nothing")
        return known[event.anchor]
    if isinstance(event, yaml.ScalarEvent):
        value: Any = _scalar(event)
    elif isinstance(event, yaml.SequenceStartEvent):
        if event.tag not in (None, "tag:yaml.org,2002:seq"):
            raise Unclear(f"tag {event.tag}")
        value = []
        while not isinstance(one := next(events), yaml.SequenceEndEvent):
            value.append(_value(one, events, known))
    else:
        value = _mapping(event, events, known)
    if event.anchor:
        known[event.anchor] = value
    return value


def _mapping(event: yaml.Event, events: Iterator[yaml.Event], known: dict[str, Any]) -> dict[str, Any]:
    if event.tag not in (None, "tag:yaml.org,2002:map"):
        raise Unclear(f"tag {event.tag}")
    value = {}
    while not isinstance(one := next(events), yaml.MappingEndEvent):
        key = _value(one, events, known)
        if not isinstance(key, str) or key in value or key == "<<":
            raise Unclear(f"the key {key!r}")
        value[key] = _value(next(events), events, known)
    return value


def _scalar(event: yaml.ScalarEvent) -> Any:
    tag = (event.tag or "").removeprefix("tag:yaml.org,2002:")
    if tag == "str" or (not tag and not event.implicit[0]):
        return event.value
    if tag and tag not in _TAGS:
        raise Unclear(f"tag {event.tag}")
    for pattern, read in _TAGS.get(tag, _CORE):
        if pattern.fullmatch(event.value):
            value = read(event.value)
            return float(value) if tag == "float" else value
    if tag:
        raise Unclear(f"{event.value!r} does not match tag {tag}")
    return event.value


def expected(job: Made) -> dict[str, Any]:
    """Return the settings in the file with its overrides. Raises `Unclear`."""
    try:
        values = spoken(job.text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unclear(str(error)) from None
    if not isinstance(values, dict):
        raise Unclear("no mapping")
    in_file, overridden = dict(values), {override.partition("=")[0] for override in job.overrides}
    for override in job.overrides:
        key, _, text = override.partition("=")
        try:
            # A byte order mark at the start is not content.
            value = spoken(bare) if (bare := text.removeprefix("\ufeff")) else None
        except Unclear:
            # Documented: an override that is not YAML is text.
            value = text
        *groups, last = key.split(".")
        inner = values
        for group in groups:
            if not isinstance(inner.get(group), dict):
                inner[group] = {}
            inner = inner[group]
        inner[last] = value
    for old, new in (("steps", "epochs"), ("epochs", "steps")):
        # Documented: an override gives the length in place of the file, whichever unit the file has.
        if old not in overridden and in_file.get(new) is None and values.get(new) is not None:
            values.pop(old, None)
    return values


# The check.


def data_in(folder: Path) -> None:
    """Write the data that good jobs refer to."""
    for name in ("data", "held_out"):
        (folder / name).mkdir()
        prepare(folder / name, "0")


def check(seed: int, folder: Path) -> str:
    """Try one job; `folder` holds data and is the working directory. Return `refused`, `accepted` or `sound`."""
    return check_made(made(seed), folder)


def check_made(job: Made, folder: Path) -> str:
    """Try a given job. Raises `Fault`, or the exception that should not have escaped."""
    file = folder / "job.yaml"
    file.write_bytes(job.text)
    words = [word for override in job.overrides for word in ("--set", override)]
    code, _, err = raytrain("validate", file, *words)
    if "Traceback (most recent call last)" in err:
        raise Fault(err)
    try:
        with limited():
            loaded, roots = load_job(file, job.overrides)
    except RaytrainError:
        if code != 2:
            raise Fault(f"validate exited with {code}, although the file has no valid job") from None
        return "refused"
    _check_said(loaded, job, file.stem)
    if code not in (0, 2):
        raise Fault(f"validate exited with {code}: {err}")
    try:
        with limited():
            order_of(loaded, roots=roots)
    except RaytrainError:
        return "accepted"
    return "sound" if code == 0 else "accepted"


def _check_said(loaded: Job, job: Made, name: str) -> None:
    """Raise `Fault` if a job differs from its file, or does not load back equal."""
    with limited():
        again = read_job(loaded.to_yaml(), "job.yaml", "other")
    if repr(again) != repr(loaded):
        raise Fault(f"the job loads back as another: {again} for {loaded}")
    try:
        values = expected(job)
    except (Unclear, RecursionError) as unclear:
        raise Fault(f"accepted, but libyaml disagrees: {unclear}: {loaded}") from None
    told = dict(_said(Job, {"name": name, **values}))
    got = dict(flatten(loaded))
    for key, value in told.items():
        if key not in got or repr(_plain(got[key])) != repr(_plain(value)):
            raise Fault(f"{key} is {got.get(key)!r}, but the file says {value!r}")


def _said(cls: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every given setting as (dotted key, value)."""
    for name, value in values.items():
        if name not in settings_of(cls):
            raise Fault(f"accepted with the setting {prefix}{name}, which does not exist")
        group = settings_of(cls)[name].group
        if group is not None and isinstance(value, Mapping):
            yield from _said(group, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
