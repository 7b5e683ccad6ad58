"""Which test executes which command of the pages. Pure.

A walk executes commands in order, as a reader would, in a copy of the repository (`tests/integration/test_walks`).
The text of each command is that of the page; only its length, and what a page leaves open, is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEAD = "ray start --head"
"""Executed by `tests/integration/head`, with ports and a folder of its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page, and what its output must match."""

    command: str
    shows: str = ""
    """A regular expression, found in what it prints."""
    also: str = ""
    """Words added at its end."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Text in it -> text that replaces it."""
    code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Commands in order."""

    steps: tuple[Step, ...]
    slow: bool = True
    cluster: bool = False
    """Whether a cluster is there, started by `HEAD`."""
    bare: bool = False
    """Whether there is no environment yet: the walk makes one."""
    timeout_s: int = 400


_SHORT = {"--set steps=600": "--set steps=18"}
_BYTE_GPT_IN_STAGES = "--set parallel.pipeline=2 --set parallel.microbatches=2"

WALKS = {
    "first run": Walk(
        slow=False,
        steps=(
            Step("raytrain data jobs/digits.yaml", r"1,437 rows"),
            Step("raytrain validate jobs/digits.yaml", r"digits: OK"),
            Step("raytrain run jobs/digits.yaml", r"digits finished: 30 steps"),
            Step("raytrain status", r"digits: finished"),
            Step("raytrain status digits", r"finished"),
            Step("raytrain status digits --json", r'"saved_step": 29'),
            Step("raytrain audit digits", r"rows"),
            Step("raytrain export digits --to model.safetensors", r"the model after step 30 of digits"),
            Step("raytrain export digits --step 30 --to out/model.safetensors", r"the model after step 30 of digits"),
            Step("raytrain export digits --dtype bf16 --to out/half.safetensors", r"the model after step 30 of digits"),
            Step("raytrain resume digits", r"digits was already finished on .* nothing was trained"),
        ),
    ),
    "begin": Walk(
        steps=(
            # It writes the data.
            Step("raytrain data jobs/digits.yaml", r"1,437 rows"),
            Step("raytrain validate jobs/digits.yaml", r"digits: OK"),
            Step("raytrain new-job examples.digits:Digits --data data/digits/train --to first.yaml", r"wrote a job"),
            Step("raytrain init first", r"wrote digits.py, digits.yaml, test_digits.py"),
            Step("cd first"),
            Step("pytest test_digits.py", r"test_digits.py"),
            Step("raytrain validate digits.yaml", r"digits: OK"),
            Step("raytrain run digits.yaml", r"digits finished: 300 steps"),
            Step(
                "raytrain verify digits.yaml --set reduction=exact --workers 1,2 --kill 1",
                r"all runs gave the same bits and used every row once",
            ),
        ),
    ),
    "detached": Walk(
        steps=(
            Step("raytrain run jobs/digits.yaml --fresh --detach", r"digits runs detached", also="--set epochs=5000"),
            Step("raytrain rescale digits --max 8", r"workers.min 1, max 8, spares 0 from now on"),
            Step("raytrain stop digits", r"digits: stopped after"),
            Step("raytrain attach digits", r"digits stopped", code=143),
            Step("raytrain logs digits -f", r"2 workers ready"),
        ),
    ),
    "no Ray": Walk(
        steps=(
            Step(". .venv/bin/activate"),
            Step("raytrain doctor", r"PASS  Python"),
            Step("python -m raytrain_plus.job.reference", r"- `name` \(text, required\)"),
            Step("python -m raytrain_plus.job.combinations", r"`compile: true` \| yes"),
            Step("raytrain validate jobs/byte_gpt.yaml --cluster clusters/aws.yaml", r"room for"),
            Step("ray get-auth-token --generate", r"\w{20}"),
            Step(f"raytrain validate jobs/byte_gpt.yaml {_BYTE_GPT_IN_STAGES}", r"stage"),
            Step("raytrain validate jobs/gpt_3d.yaml", r"gpt_3d: OK"),
            Step("raytrain validate jobs/moe_gpt.yaml", r"moe_gpt: OK"),
            Step("raytrain plan jobs/byte_gpt.yaml --sizes 1..8", r"replicas x stages"),
            Step("raytrain plan jobs/byte_gpt.yaml --cluster clusters/aws.yaml --memory 2G", r"machines"),
            Step("python -m raytrain_plus.planner.approach", r"530 billion"),
        ),
    ),
    "settings": Walk(
        steps=(
            Step("raytrain run jobs/digits.yaml --set data.batch_size=192 --fresh", r"digits finished: 15 steps"),
            Step("raytrain run jobs/digits.yaml --set reduction=exact --fresh", r"digits finished: 30 steps"),
            Step("raytrain resume digits --set 'workers={min: 1}'", r"digits was already finished"),
            Step(
                "raytrain verify jobs/digits.yaml --set reduction=exact --workers 1,2,4 --kill 1 --kill-controller 1 "
                "--steps 200",
                r"all runs gave the same bits and used every row once",
            ),
            Step(
                "raytrain run jobs/digits.yaml --fresh --fault 'kill controller at=10'",
                r"the controller was replaced",
                also="--set epochs=40",
            ),
        ),
    ),
    "stages": Walk(
        steps=(
            Step(f"raytrain run jobs/byte_gpt.yaml {_BYTE_GPT_IN_STAGES} --fresh", r"byte_gpt finished: 12 steps"),
            Step("raytrain resume byte_gpt --set steps=600", r"byte_gpt finished: 18 steps", instead=_SHORT),
            Step("raytrain run jobs/gpt_3d.yaml", r"gpt_3d finished: 6", also="--set steps=6 --set workers.max=4"),
            Step("raytrain run jobs/moe_gpt.yaml", r"moe_gpt finished: 6", also="--set steps=6"),
        ),
    ),
    "gpt": Walk(
        steps=(
            Step(
                "raytrain run jobs/gpt_125m.yaml --set args.size=tiny --set 'workers={max: 2}' --set steps=20",
                r"gpt_125m finished: 4 steps",
                instead={"steps=20": "steps=4"},
            ),
        ),
    ),
    "cluster": Walk(
        cluster=True,
        timeout_s=600,
        steps=(
            Step("raytrain run jobs/digits.yaml --address HOST:6379", r"digits finished: 30 steps"),
            Step(
                "raytrain submit jobs/byte_gpt.yaml --follow --set storage=$PWD/runs",
                r"byte_gpt finished: 12 steps",
                also="--address http://HOST:8265",
            ),
            Step(
                "raytrain submit jobs/byte_gpt.yaml --address http://HOST:8265 --set storage=s3://BUCKET/runs",
                # The same run, in the same place.
                r"byte_gpt was already finished",
                also="--follow",
                instead={"s3://BUCKET/runs": "$PWD/runs"},
            ),
            Step("raytrain status byte_gpt --address http://HOST:8265", r"byte_gpt: \w+"),
            Step("export RAY_ADDRESS=http://HOST:8265"),
            Step(
                "ray job submit --working-dir . -- python -m raytrain_plus run jobs/byte_gpt.yaml",
                r"byte_gpt finished: 12 steps",
            ),
        ),
    ),
    "install": Walk(
        bare=True,
        timeout_s=900,
        steps=(
            Step("python3 -m venv .venv && . .venv/bin/activate"),
            Step("pip install '.[examples]'", r"Successfully installed raytrain-plus"),
            Step("pip install '.[horovod]' && raytrain install-horovod", r"Horovod works"),
            Step("pip install '.[s3]'", r"Successfully installed raytrain-plus"),
            Step("pip install '.[mlflow]'", r"Successfully installed raytrain-plus"),
            # The packages of wandb are not among those of the tests.
            Step("pip install '.[wandb]'", r"Successfully installed raytrain-plus", also="--no-deps"),
            # Nor are all of those of transformers.
            Step("pip install '.[transformers]'", r"Successfully installed raytrain-plus", also="--no-deps"),
            Step("pip install 'ray[serve]'", r"already satisfied"),
            Step("pip wheel . --no-deps -w clusters/wheels", r"raytrain_plus-\S+\.whl"),
            Step("raytrain install-horovod --to clusters/wheels", r"copied to clusters/wheels/horovod-"),
        ),
    ),
    "make": Walk(
        timeout_s=900,
        steps=(
            # pytest only collects: see `environment` in tests/integration/test_walks.
            Step("make check", r"Contracts: \d+ kept, 0 broken"),
            Step("make unit", r"tests/unit/test_pages.py"),
            Step("make test", r"tests/integration/test_walks.py"),
            Step("make test-slow", r"tests/integration/test_soak.py"),
            Step("make test-gpu", r"tests/integration/test_gpu.py"),
            Step("pytest -m slow tests/integration/test_soak.py", r"tests/integration/test_soak.py"),
            Step("make demo", r"byte_gpt finished: 75 steps"),
        ),
    ),
    "benchmarks": Walk(
        timeout_s=3000,
        # Their lengths: `SHORTER` in tests/integration/test_walks.
        steps=(
            Step("make bench", r"1 rounds in"),
            Step("make bench-costs", r"gpipe"),
            Step("make bench-gpu", r"no GPU|plain loop"),
            Step("make bench-recovery", r"raytrain_plus, shrinking"),
            Step("python -m tests.benchmarks.drift", r"exact, float32"),
            Step("python -m tests.benchmarks.plans", r"Kendall tau"),
            Step("python -m tests.benchmarks.conversion", r"s by Ray Data with its start"),
            Step("python -m tests.benchmarks.images", r"data\.dataset +[\d.]+ steps/s"),
            Step(
                "python -m tests.benchmarks.recovery --only stages,stages_spare,repartition,repartition_two --kills 10",
                r"4 stages to 2",
                instead={"--kills 10": "--kills 1"},
            ),
            Step("python -m tests.benchmarks.techniques --rounds 9 --width 256 --depth 6", r"compiled, is built again"),
            Step(
                "python -m tests.benchmarks.recovery --only ours,sharded,spare,sharded_spare",
                r"sharded, a spare",
                instead={"spare,sharded_spare": "spare,sharded_spare --kills 1"},
            ),
            Step("python -m tests.benchmarks.sharded", r"ZeroRedundancyOptimizer \| \d+"),
            Step("python -m tests.benchmarks.pipeline --rounds 1", r"zero-bubble"),
            Step("python -m tests.benchmarks.phases", r"raytrain_plus, torch"),
            Step("python -m tests.benchmarks.overlap", r"of the reduction is hidden"),
            Step(
                "python -m tests.benchmarks.overlap --schedule pipedream --width 1536 --pad 0.03 --steps 20",
                r"of the reduction is hidden",
            ),
            Step("python -m tests.benchmarks.slices --ranks 2", r"steps/s of ours to torch.s"),
            Step("python -m tests.benchmarks.experts pace", r"steps/s of ours to "),
            Step("python -m tests.benchmarks.experts curves", r"sparse below dense by"),
            Step("python -m tests.benchmarks.replacement", r"of 4: median"),
        ),
    ),
}

OTHERS = {
    "raytrain init first --template session": "unit/begin/test_write.py::test_the_written_task_makes_a_step",
    "raytrain export RUN --format transformers --to models/reviews": "integration/one_ray/test_bring.py::"
    "test_a_folder_with_another_head_trains_to_the_same_bits_through_a_death_and_opens",
    "raytrain export RUN --format adapter --to models/reviews-adapter": "integration/one_ray/test_bring.py::"
    "test_an_adapter_is_all_that_a_run_saves_and_both_exports_open",
    "raytrain export RUN --format lightning --to FILE.ckpt": "integration/one_ray/test_lightning.py::"
    "test_a_checkpoint_of_lightning_opens_and_a_run_is_resumed",
    "raytrain run SCRIPT.py --set workers.max=4": "integration/one_ray/test_trainer.py::"
    "test_a_script_is_executed_with_settings_given_beside_it",
    HEAD: "integration/test_walks.py::test_a_walk_through_the_pages",
    "python -m examples.lost_worker": "integration/test_picture.py::test_a_worker_is_killed_and_drawn",
}
"""Commands that a test executes otherwise: command -> the test, from `tests/`."""


def executed() -> dict[str, str]:
    """Return which command is executed where."""
    walked = {step.command: f"walk: {name}" for name, walk in WALKS.items() for step in walk.steps}
    return {**walked, **OTHERS}
