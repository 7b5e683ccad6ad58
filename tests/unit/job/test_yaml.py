"""Job files: every mistake is found, placed and explained; the result is always a `Job` or a `JobError`."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus import Data, Job, JobError, Workers
from raytrain_plus.job.parallel_checks import TWO_CHUNKS
from raytrain_plus.job.sameness import Kept, kept_settings
from raytrain_plus.job.settings import Schedule, setting_of
from raytrain_plus.job.yaml import load_job
from raytrain_plus.parallel.pipeline.layout import chunk_stages

GOOD = """\
task: examples.digits:Digits
data: {path: data/digits, batch_size: 96, shards: 12}
steps: 10
"""
MIXED = GOOD.replace("path: data/digits", "mix: [{path: a, weight: 3}, {path: b, weight: 1}]")


def load(tmp_path: Path, text: str, *overrides: str) -> Job:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return load_job(file, overrides)[0]


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(tmp_path, text, *overrides)
    return [str(problem).replace(str(tmp_path), "") for problem in caught.value.problems]


def test_a_good_job(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD + "clip_norm: 1e-3\nworkers: {min: 2}\n")
    assert (job.name, job.clip_norm, job.workers.min, job.data.shuffle) == ("job", 0.001, 2, "rows")


STAGES = "workers: {min: 2, max: 3}\nparallel: {pipeline: 2}\n"
PIPEDREAM = "workers: {min: 2, max: 4}\nparallel: {pipeline: 2, schedule: pipedream}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (GOOD + "clip_nrom: 1\n", [], "/job.yaml:4:1 clip_nrom: unknown setting"),
        (GOOD + "clip_nrom: 1\n", [], "did you mean 'clip_norm'?"),
        (GOOD + "data: {path: x}\n", [], "/job.yaml:4:1 data: is given twice, first on line 2"),
        (GOOD.replace("96", "ninety"), [], "/job.yaml:2:27 data.batch_size: 'ninety' is not allowed"),
        (GOOD.replace("96", "true"), [], "data.batch_size: True is not allowed"),
        (
            GOOD.replace("96", "100"),
            [],
            "data.batch_size: 100 is not a multiple of data.shards = 12\n  expected: 96 or 108",
        ),
        (
            GOOD,
            ["data.image_size=[32]"],
            "data.image_size=[32]: [32] is not a size of images\n  expected: [height, width]",
        ),
        (GOOD, ["data.columns=[]"], "it names no column"),
        (GOOD, ["data.columns=[x, x]"], "it names a column twice"),
        (
            GOOD,
            ["data.columns={x: flaot32}"],
            "'flaot32' is not a type that a column can be read with ('x')\n  expected: bool, int8",
        ),
        (
            GOOD,
            ["data.columns=x"],
            "'x' is not allowed\n  expected: a list of strings or a mapping with strings as keys",
        ),
        (GOOD, ["data.image_size=[32, 0]"], "[32, 0] is not a size of images"),
        (GOOD, ["data.image_size=[32, 1000000]"], "[32, 1000000] is not a size of images"),
        (GOOD, ["data.image_size=[32, 1.5]"], "expected: a list of integers or null"),
        (GOOD, ["data.image_size=[true, 3]"], "expected: a list of integers or null"),
        (GOOD, ["data.pack=1"], "data.pack=1: 1 is not allowed\n  expected: 2 or more"),
        (GOOD, ["data.pack=2000000"], "data.pack=2000000: 2000000 is not allowed\n  expected: at most 1,048,576"),
        (
            GOOD,
            ["data.pack=32", "data.collate=pad"],
            "data.pack=32: all rows have 32 tokens already, so there is nothing for data.collate: pad to do",
        ),
        (
            GOOD,
            ["data.pack=32", "data.collate=pack"],
            "data.pack=32: all rows have 32 tokens already, so there is nothing for data.collate: pack to do",
        ),
        (
            GOOD,
            ["data.group_by_length=ids"],
            "data.group_by_length=ids: rows are grouped by length out of a dataset that is read by index, and shuffled",
        ),
        (
            GOOD,
            ["data.pack=32", "data.image_size=[8, 8]"],
            "data.pack=32: packed rows hold tokens and no images, so data.image_size has no use",
        ),
        (GOOD, ["data.image_size=32"], "32 is not allowed\n  expected: a list of integers or null"),
        (GOOD + "epochs: 3\n", [], "steps: both `steps` and `epochs` are given"),
        (GOOD.replace("steps: 10\n", ""), [], "steps: neither `steps` nor `epochs` is given"),
        (GOOD.replace("task: examples.digits:Digits\n", ""), [], "/job.yaml task: is missing"),
        (GOOD.replace("path: data/digits, ", ""), [], "/job.yaml:2:1 data.path: neither `path` nor `dataset`"),
        (GOOD + "workers: {min: 3, max: 2}\n", [], "/job.yaml:4:19 workers.max: 2 is less than workers.min = 3"),
        (GOOD + "workers: {min: 13}\n", [], "workers.min: 13 workers for data.shards = 12"),
        (GOOD + "workers: {min: 0}\n", [], "workers.min: 0 is not allowed"),
        (
            GOOD + "workers: 3\n",
            [],
            "workers: 3 is not allowed\n  expected: a group of settings, such as workers.min\n"
            "  fix: workers={min: 3, max: 3}",
        ),
        (GOOD, ["elastic=3"], "elastic=3: 3 is not allowed\n  expected: a group of settings, such as elastic."),
        (GOOD + "workers: {gpus: 0.5}\n", [], "workers.gpus: 0.5 is not allowed\n  expected: 0 or 1"),
        (GOOD + "workers: {accelerator: 'an H100'}\n", [], "workers.accelerator: 'an H100' is not an accelerator type"),
        (GOOD + "name: ../escape\n", [], "/job.yaml:4:1 name: '../escape' contains a path separator"),
        (GOOD + "name: 3.5\n", [], "name: 3.5 is not allowed\n  expected: a string"),
        (GOOD + "clip_norm: .nan\n", [], "clip_norm: nan is not allowed"),
        (GOOD + "seed: 010\n", [], "seed: '010' is not allowed\n  expected: an integer"),
        (GOOD + "seed: 1:30\n", [], "seed: '1:30' is not allowed"),
        (
            GOOD + "collective: mpi\n",
            [],
            "collective: 'mpi' is not allowed\n  expected: one of auto, horovod, torch, nccl",
        ),
        (GOOD + "task_args: [1\n", [], "/job.yaml:5:1: is not valid YAML"),
        (GOOD + "trackers: mlflow\n", [], "trackers: 'mlflow' is not allowed\n  expected: a list of strings"),
        (GOOD + "trackers: [mlfow]\n", [], "unknown tracker 'mlfow'\n  expected: mlflow or wandb; TensorBoard"),
        (GOOD + "trackers: [mlfow]\n", [], "did you mean 'mlflow'?"),
        (GOOD + "trackers: [wandb, wandb]\n", [], "trackers: a tracker is listed twice"),
        (GOOD + "storage: ftp://KEY:SECRET@host\n", [], "storage: unsupported address 'ftp://...'"),
        (GOOD + "args: !!python/object:os.system x\n", [], "args: the tag tag:yaml.org,2002:python/object:os.system"),
        (GOOD + PIPEDREAM, ["parallel.pipeline=1"], "the pipedream schedule needs at least two stages"),
        (
            GOOD,
            ["workers.min=2", "parallel.sharded=optimizer", "parallel.holders=3"],
            "3 holders of each row, but there are",
        ),
        (GOOD, ["parallel.sharded=optimizer"], "the state of one worker is not sharded"),
        (GOOD, ["parallel.holders=0"], "parallel.holders=0: 0 is not allowed"),
        (
            GOOD,
            ["workers.min=4", "parallel.pipeline=2", "parallel.sharded=full"],
            "the weights of a model in 2 stages are not sharded",
        ),
        (GOOD + PIPEDREAM, ["workers.min=4", "parallel.sharded=optimizer"], "pipedream does not support a sharded"),
        (GOOD + STAGES, ["parallel.sharded=optimizer"], "the state of one replica is not sharded"),
        (
            GOOD,
            ["workers.min=4", "parallel.pipeline=2", "parallel.sharded=optimizer", "parallel.holders=3"],
            "3 holders of each row, but there are at most 2 replicas",
        ),
        (GOOD + PIPEDREAM, ["reduction=exact"], "pipedream does not support reduction: exact"),
        (GOOD + PIPEDREAM, ["clip_norm=1"], "clip_norm, which needs the gradients of all stages at the same step"),
        (GOOD + PIPEDREAM, ["elastic.on_nonfinite=skip"], "pipedream does not support on_nonfinite: skip"),
        (GOOD, ["precision=tf32"], "tf32 is a format of GPUs, and workers.gpus is 0"),
        (
            GOOD + STAGES,
            ["precision=fp16", "parallel.schedule=pipedream"],
            "pipedream does not support fp16: a step that overflows is computed again",
        ),
        (
            GOOD + STAGES,
            ["recompute=[in]", "parallel.schedule=zero-bubble"],
            "the zero-bubble schedule makes each backward pass in two parts",
        ),
        (
            GOOD + STAGES,
            ["compile=true", "parallel.schedule=zero-bubble"],
            "the zero-bubble schedule divides backward passes at their operations",
        ),
        (GOOD, ["parallel.tensor=3"], "3 is no power of two"),
        (GOOD, ["parallel.experts=6"], "6 is no power of two"),
        (GOOD, ["parallel.experts=2", "compile=true"], "layers that are cut into slices exchange sums while they"),
        (
            GOOD,
            ["workers.min=4", "parallel.experts=4", "parallel.tensor=2"],
            "4 slices of experts and 2 slices of weights cannot be hosted on the same workers",
        ),
        (
            GOOD,
            ["workers.min=4", "parallel.experts=2", "parallel.sharded=full"],
            "the weights of slices of experts are not sharded",
        ),
        (
            GOOD + STAGES,
            ["parallel.experts=2", "parallel.schedule=zero-bubble"],
            "zero-bubble does not support slices of experts",
        ),
        (GOOD, ["parallel.tensor=2", "compile=true"], "layers that are cut into slices exchange sums while they"),
        (
            GOOD,
            ["workers.min=4", "parallel.tensor=2", "parallel.sharded=full"],
            "the weights of tensor slices are not sharded",
        ),
        (
            GOOD,
            ["workers.min=2", "parallel.tensor=2", "parallel.sharded=optimizer"],
            "the state of one replica is not sharded\n  expected: sharded: none, or workers.max of 4 or more",
        ),
        (
            GOOD + STAGES,
            ["parallel.tensor=2", "parallel.schedule=zero-bubble"],
            "zero-bubble does not support tensor slices",
        ),
        (
            GOOD,
            ["workers.min=9", "parallel.tensor=2", "data.shards=4"],
            "9 workers for data.shards = 4 and parallel.te",
        ),
        (GOOD, ["ema={decay: 1}"], "1 is not allowed\n  expected: a number above 0 and below 1"),
        (GOOD, ["precision=int8"], "'int8' is not allowed\n  expected: one of fp32, tf32, bf16, fp16, bf16-params"),
        (GOOD, ["reduction=exact", "compression=bf16"], "compression: bf16 rounds the gradients on their way"),
        (GOOD, ["data.on_error=ignore"], "data.on_error=ignore: 'ignore' is not allowed"),
        (
            GOOD,
            ["data.on_error=skip", "parallel.pipeline=2"],
            "data.on_error: skip needs the whole model in each worker",
        ),
        (GOOD + "elastic: {on_nonfinite: ignore}\n", [], "elastic.on_nonfinite: 'ignore' is not allowed"),
        (GOOD + PIPEDREAM, ["workers.min=1"], "lets the run repartition the model"),
        (GOOD + "parallel: {commit_every: 0}\n", [], "parallel.commit_every: 0"),
        (
            GOOD + STAGES,
            ["parallel.partition=[a]"],
            "partition=[a]: 1 name for 2 stages of 1f1b\n  expected: 2 names: the",
        ),
        (
            GOOD + STAGES,
            ["parallel.partition=[a, b, c]", "parallel.schedule=zero-bubble"],
            "3 names for 2 stages of zero",
        ),
        (
            GOOD + STAGES,
            ["data.collate=pack"],
            "data.collate=pack: packed microbatches differ in their number of tokens",
        ),
        (GOOD, ["parallel.partition=[a]"], "partition=[a]: a model in one stage has no partition"),
        (GOOD + STAGES, ["parallel.partition=[0, 2]"], "expected: a list of strings or null"),
        (GOOD + "elastic: {copy_every: 0}\n", [], "elastic.copy_every: 0"),
        (GOOD + "parallel: {microbatches: 3}\n", [], "parallel.microbatches: 3 does not divide the 8 rows"),
        (GOOD, ["data.dataset=a:b"], "data.path: both `path` and `dataset` are given"),
        (GOOD, ["data.mix=[{path: a, weight: 1}, {path: b, weight: 1}]"], "data.path: both `path` and `mix` are given"),
        (MIXED, ["data.dataset=a:b"], "data.path: both `dataset` and `mix` are given"),
        (MIXED, ["data.path=a", "data.dataset=a:b"], "data.path=a: `path`, `dataset` and `mix` are given"),
        (MIXED, ["data.mix=[]"], "data.mix=[]: 0 sources cannot be mixed\n  expected: 2 to 16 sources"),
        (MIXED, ["data.mix=[{path: a, weight: 1}]"], "1 source cannot be mixed"),
        (MIXED, [f"data.mix=[{', '.join(['{path: a, weight: 1}'] * 17)}]"], "17 sources cannot be mixed"),
        (MIXED, ["data.mix=[a, b]"], "a list is not allowed\n  expected: a list of mappings or null"),
        (MIXED, ["data.mix={path: a}"], "a dict is not allowed\n  expected: a list of mappings or null"),
        (MIXED.replace("weight: 3", "wieght: 3"), [], "job.yaml:2:8 data.mix: source 0: unknown setting 'wieght'"),
        (MIXED.replace("weight: 3", "wieght: 3"), [], "did you mean 'weight'?"),
        (MIXED.replace("weight: 1", "weight: 0"), [], "data.mix: source 1: its weight 0 is not allowed"),
        (MIXED.replace("weight: 1", "weight: .nan"), [], "source 1: its weight nan is not allowed"),
        (MIXED.replace("weight: 1", "weight: true"), [], "source 1: its weight True is not allowed"),
        (MIXED.replace("weight: 1", "weight: '1'"), [], "source 1: its weight '1' is not allowed"),
        (MIXED.replace("weight: 1", "weight: .inf"), [], "source 1: its weight inf is not allowed"),
        (MIXED.replace(", weight: 1", ""), [], "source 1: its weight is missing"),
        (MIXED.replace("weight: 1", "weight: 1e-4"), [], "source 1: its weight is less than a ten-thousandth of all"),
        (MIXED.replace("path: b, ", ""), [], "source 1: neither `path` nor `dataset` is given"),
        (MIXED.replace("path: b", "path: 7"), [], "source 1: its path 7 is not allowed\n  expected: a string"),
        (MIXED.replace("path: b", "path: b, dataset: a:b"), [], "source 1: both `path` and `dataset` are given"),
        (MIXED.replace("path: b", "dataset: ab"), [], "source 1: 'ab' is not an import path"),
        (MIXED.replace("path: b", "path: b, format: cvs"), [], "source 1: its format 'cvs' is not allowed"),
        (MIXED.replace("path: b", "path: b, format: [csv]"), [], "source 1: its format ['csv'] is not allowed"),
        (MIXED.replace("path: b", "dataset: a:b, format: csv"), [], "its format 'csv' is not allowed"),
        (MIXED.replace("path: b", "path: 's3://k:s@b/x'"), [], "the address contains a credential"),
        (MIXED.replace("steps: 10", "epochs: 2"), [], "each source of data.mix has epochs of its own"),
        (MIXED, ["data.format=csv"], "data.format=csv: each source of data.mix has a format of its own"),
        (GOOD.replace("path: data/digits", "dataset: a:b, format: csv"), [], "data.format: it is for data at a path"),
        (GOOD.replace("path: data/digits", "dataset: a:b, prepare: a:p"), [], "data.prepare: it is for data at a path"),
        (GOOD.replace("path: data/digits", "dataset: ab"), [], "data.dataset: 'ab' is not an import path"),
        (GOOD + "evaluate: {every_steps: 1}\n", [], "evaluate.path: neither `path` nor `dataset` is given"),
        (GOOD + "evaluate: {path: x}\n", [], "evaluate.every_steps: is missing"),
        (GOOD + "early_stop: {metric: loss, patience: 3}\n", [], "early_stop.metric: 'loss' needs an evaluation"),
        (GOOD + "early_stop: {metric: loss, patience: 0}\n", [], "early_stop.patience: 0 is not allowed"),
        (
            GOOD + "early_stop: {metric: a, patience: 1}\ncheckpoint: {keep_best: {metric: a, mode: max}}\n",
            [],
            "early_stop.metric: early_stop keeps the best state by a (min), and checkpoint.keep_best by a (max)",
        ),
        (GOOD, ["profile.steps=[3]"], "[3] is not a range of steps\n  expected: [first, end]: two rising"),
        (GOOD, ["profile.steps=[-1, 3]"], "[-1, 3] is not a range of steps"),
        (GOOD, ["profile.steps=[3, 3]"], "[3, 3] is not a range of steps"),
        (GOOD, ["profile.steps=[1, true]"], "profile.steps=[1, true]: a list is not allowed"),
        (GOOD, ["profile.steps=[3, 11]"], "[3, 11] ends after the job's last step: it has 10 steps"),
        (GOOD + "profile: {steps: [3, 10], workers: 0}\n", [], "profile.workers: 0 is not allowed"),
        (GOOD + "profile: {workers: 1}\n", [], "profile.steps: is missing"),
        (GOOD.replace("examples.digits:Digits", "digits"), [], "task: 'digits' is not an import path"),
        (
            GOOD.replace("examples.digits:Digits", "examples.digits.Digits"),
            [],
            "did you mean 'examples.digits:Digits'?",
        ),
        (GOOD + "data2:\n\tpath: x\n", [], "a tab indents this line"),
        (GOOD, ["data.batchsize=3"], "--set data.batchsize=3: unknown setting"),
        (GOOD, ["data.batch_size=100"], "--set data.batch_size=100: 100 is not a multiple"),
        (GOOD, ["nonsense"], "--set nonsense: is not an override"),
        ("", [], "/job.yaml: is empty"),
        ("- 1\n", [], "/job.yaml: contains no settings"),
    ],
)
def test_mistakes_are_placed_and_explained(tmp_path: Path, text: str, overrides: list[str], expected: str) -> None:
    found = problems(tmp_path, text, *overrides)
    assert any(expected in problem for problem in found), found


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    text = "task: examples.digits:Digits\ndata: {batch_size: 97, shards: 12}\nsteps: no\nclip: 1\nname: a/b\n"
    found = "\n".join(problems(tmp_path, text))
    for expected in (
        "data.path",
        "97 is not a multiple",
        "'no' is not allowed",
        "clip: unknown setting",
        "contains a path separator",
    ):
        assert expected in found


def test_overrides_reach_into_groups(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        GOOD,
        "data.batch_size=24",
        "workers.min=2",
        "args={width: 3}",
        "evaluate.path=x",
        "evaluate.every_steps=5",
    )
    assert (job.data.batch_size, job.workers.min, job.args) == (24, 2, {"width": 3})
    assert job.evaluate is not None
    assert job.evaluate.every_steps == 5


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(GOOD)
    with pytest.raises(JobError, match=r"file not found\n  fix: did you mean .*digits.yaml"):
        load_job(tmp_path / "digit.yaml")


def test_a_folder_and_binary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is a folder"):
        load_job(tmp_path)
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(JobError, match="is not UTF-8 text"):
        load_job(tmp_path / "job.yaml")


def test_an_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    assert any("too large" in problem for problem in problems(tmp_path, "\n".join(lines)))


def test_a_resolved_job_loads_back_equal(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD + "evaluate: {path: x, every_steps: 3}\nargs: {width: 3, note: 'no'}\n")
    assert load(tmp_path, job.to_yaml()) == job


def test_python_says_the_same_as_yaml(tmp_path: Path) -> None:
    written = Job(
        name="job", task="examples.digits:Digits", data=Data(path="data/digits", batch_size=96, shards=12), steps=10
    )
    assert written == load(tmp_path, GOOD)
    with pytest.raises(JobError) as caught:
        Job(name="a/b", task="t:T", data=Data(path="x", batch_size=3, shards=2), workers=Workers(min=3))
    assert len(caught.value.problems) == 4


def test_which_changes_keep_a_job_the_same(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    resolved = job.to_yaml()
    same = load(tmp_path, GOOD, "workers.min=4", "collective=torch", "storage=s3://bucket/runs?region=x")
    assert same.same_as(resolved) == []
    other = load(tmp_path, GOOD, "seed=1", "data.batch_size=48", "args={width: 1}")
    assert other.same_as(resolved) == ["args", "seed", "data.batch_size"]


SETTINGS = {key: kept for key, kept, _ in kept_settings(Job)}
PLACES = ("data.path", "data.dataset", "data.mix")
"""The first excludes the others."""
LENGTHS = ("steps", "epochs")


def test_every_setting_says_whether_a_run_keeps_it() -> None:
    assert [key for key, kept in SETTINGS.items() if kept is None] == []


OTHER = {
    "data.columns": "[pixels, label]",
    "parallel.schedule": "gpipe",
    "ema": "{decay: 0.9}",
    "checkpoint.keep_best": "{metric: loss}",
    "evaluate": "{path: x, every_steps: 3}",
    "early_stop": "{metric: loss, patience: 3}",
    "profile": "{steps: [2, 4]}",
}
"""A value of each setting whose type says too little."""


def values_of(hint: Any) -> Iterator[str]:
    """Yield some values of a type, as YAML."""
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(one) is Literal:
            yield from map(str, get_args(one))
        else:
            yield from {
                bool: ["true", "false"],
                int: ["1", "2", "4", "7", "24", "32"],
                float: ["1", "0.5", "7"],
                str: ["a:b", "elsewhere"],
                Sequence[str]: ["[a, b]", "[mlflow]"],
                Sequence[int]: ["[32, 48]"],
                Mapping[str, Any]: ["{width: 9}"],
            }.get(one, [])


EVALUATED = GOOD + "evaluate: {path: held/out, every_steps: 3}\n"
READ_BY_INDEX = EVALUATED.replace("path: data/digits", "dataset: a:rows")
BASES = [
    (EVALUATED + STAGES, ()),
    (EVALUATED, ("workers.min=2",)),
    (EVALUATED, ("data.windows=8",)),
    (EVALUATED, ()),
    (READ_BY_INDEX, ()),
]


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in (*PLACES[1:], *LENGTHS[1:])])
def test_a_job_with_another_value_is_the_same_only_if_no_run_keeps_the_setting(tmp_path: Path, key: str) -> None:
    kept = SETTINGS[key]
    found = 0
    for text, size in BASES:
        before = load(tmp_path, text, *size)
        for value in [OTHER[key]] if key in OTHER else values_of(setting_of(key).hint):
            try:
                after = load(tmp_path, text, *size, f"{key}={value}")
            except JobError:
                continue
            if before != after:
                found += 1
                always = kept in (Kept.ALWAYS, Kept.UNLESS_RESUMED)
                assert after.same_as(before.to_yaml()) == ([key] if always else [])
                assert after.same_as(before.to_yaml(), resumes=True) == ([key] if kept is Kept.ALWAYS else [])
    assert found


def test_a_run_from_before_a_setting_existed_is_still_the_same_job(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    older = "".join(line for line in job.to_yaml().splitlines(True) if not line.startswith("compression:"))
    assert older != job.to_yaml()
    assert job.same_as(older) == []
    assert load(tmp_path, GOOD, "compression=fp16").same_as(older) == ["compression"]
    older = "".join(line for line in job.to_yaml().splitlines(True) if not line.startswith("  on_error:"))
    assert older != job.to_yaml()
    assert job.same_as(older) == []
    assert load(tmp_path, GOOD, "data.on_error=skip").same_as(older) == ["data.on_error"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_where_the_optimizer_runs_belongs_to_a_job_on_gpus(tmp_path: Path, gpus: int) -> None:
    before, after = (load(tmp_path, GOOD, f"workers.gpus={gpus}", f"offload={one}") for one in ("none", "optimizer"))
    assert after.same_as(before.to_yaml()) == ["offload"] * gpus
    older = "".join(line for line in before.to_yaml().splitlines(True) if not line.startswith("offload:"))
    assert before.same_as(older) == []


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ("schedule=1f1b", "schedule=pipedream", ["schedule"]),
        ("schedule=pipedream", "schedule=gpipe", ["schedule"]),
        ("schedule=pipedream", "commit_every=4", ["schedule", "commit_every"]),
        ("schedule=pipedream commit_every=4", "schedule=pipedream", ["commit_every"]),
        ("schedule=pipedream", "schedule=pipedream commit_every=16", []),
        ("schedule=gpipe", "schedule=interleaved commit_every=4", []),
        ("schedule=pipedream partition=[a,b]", "schedule=pipedream", ["partition"]),
        ("schedule=pipedream partition=[a,b]", "schedule=pipedream partition=[a,c]", ["partition"]),
        ("schedule=pipedream partition=[a,b]", "schedule=pipedream partition=[a,b]", []),
        ("partition=[a,b]", "partition=[a,c]", []),
    ],
)
def test_with_pipedream_the_schedule_belongs_to_the_job(
    tmp_path: Path, before: str, after: str, differs: list[str]
) -> None:
    def made(settings: str) -> Job:
        overrides = [f"parallel.{setting}" for setting in settings.split()]
        return load(tmp_path, GOOD + "workers: {min: 2}\nparallel: {pipeline: 2}\n", *overrides)

    assert made(after).same_as(made(before).to_yaml()) == [f"parallel.{key}" for key in differs]


def test_a_run_from_before_there_were_stages_had_the_default_schedule(tmp_path: Path) -> None:
    older = yaml.safe_load(load(tmp_path, GOOD).to_yaml())
    older["parallel"] = {"microbatches": 1}
    pipedream = load(tmp_path, GOOD + PIPEDREAM)
    assert load(tmp_path, GOOD).same_as(yaml.safe_dump(older)) == []
    assert pipedream.same_as(yaml.safe_dump(older)) == ["parallel.schedule"]
    older["parallel"] = {"microbatches": 1, "pipeline": 2, "schedule": "pipedream"}
    # It resumes with the counted partition; another one would be another job.
    assert pipedream.same_as(yaml.safe_dump(older)) == []
    given = load(tmp_path, GOOD + PIPEDREAM, "parallel.partition=[a, b]")
    assert given.same_as(yaml.safe_dump(older)) == ["parallel.partition"]


def test_what_is_out_of_bounds_is_reported_together_with_what_contradicts(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD + "epochs: 0\n" + PIPEDREAM, "clip_norm=0", "data.dataset=nowhere")
    for said in ("0 is not allowed", "both `steps` and `epochs`", "both `path` and `dataset`", "not support clip_norm"):
        assert any(said in problem for problem in found), found
    # Nothing fails because of a value that is none.
    for key in ("parallel.pipeline", "parallel.tensor", "data.shards", "data.batch_size", "parallel.microbatches"):
        assert any("0 is n" in problem for problem in problems(tmp_path, GOOD, f"{key}=0"))


def test_schedules_with_two_chunks_are_those_of_the_layout() -> None:
    schedules = get_args(Schedule)
    assert {one for one in schedules if len(chunk_stages(one, 2)) == 4} == set(TWO_CHUNKS)


def test_a_run_keeps_what_stands_in_place_of_others(tmp_path: Path) -> None:
    by_epochs = GOOD.replace("steps: 10", "epochs: 2")
    assert load(tmp_path, by_epochs, "epochs=3").same_as(load(tmp_path, by_epochs).to_yaml()) == ["epochs"]
    returned = GOOD.replace("path: data/digits", "dataset: a:b")
    assert load(tmp_path, returned, "data.dataset=a:c").same_as(load(tmp_path, returned).to_yaml()) == ["data.dataset"]
    other = load(tmp_path, MIXED, "data.mix=[{path: a, weight: 2}, {path: b, weight: 1}]")
    assert other.same_as(load(tmp_path, MIXED).to_yaml()) == ["data.mix"]
    assert load(tmp_path, MIXED).same_as(load(tmp_path, MIXED).to_yaml()) == []


@given(st.data())
def test_mutated_files_give_a_job_or_a_job_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([GOOD, (Path(__file__).parents[3] / "jobs" / "byte_gpt.yaml").read_text()]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.text(st.characters(codec="utf-8"), max_size=5)) + text[at + cut :]
    file = tmp_path_factory.mktemp("fuzz") / "job.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    with contextlib.suppress(JobError):
        assert isinstance(load_job(file)[0], Job)


def test_a_length_replaces_one_in_the_other_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("task: a:B\nepochs: 20\ndata: {path: x, batch_size: 8}\n")
    job, _ = load_job(file, ["steps=60"])
    assert (job.steps, job.epochs) == (60, None)
    assert capsys.readouterr().err == "--set steps=60 replaces epochs: 20\n"
    job, _ = load_job(file, ["epochs=3"])
    assert (job.steps, job.epochs, capsys.readouterr().err) == (None, 3, "")
    with pytest.raises(JobError, match="exactly one of them"):
        load_job(file, ["steps=60", "epochs=3"])
    with pytest.raises(JobError, match="exactly one of them"):
        load_job(file, ["steps=60", "epochs=20"])
    file.write_text("task: a:B\nsteps: 7\ndata: {path: x, batch_size: 8}\n")
    assert load_job(file, ["epochs=2"])[0].epochs == 2
    assert capsys.readouterr().err == "--set epochs=2 replaces steps: 7\n"
