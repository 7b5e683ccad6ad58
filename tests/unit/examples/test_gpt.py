"""The GPT-2 example: its sizes, its tied head, and the tokens that it prepares."""

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from examples import gpt
from examples.byte_gpt import held_out, sources
from examples.gpt import END, GPT, ROW, SIZES, TOKENS, prepare, trained_tokenizer
from raytrain_plus import RunFacts
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.paths.page_checksum import without_checksums
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.job.yaml import load_job
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.unit.training.group import context

CPU = torch.device("cpu")
GPT_2 = 50_257
"""The tokens of GPT-2."""


@pytest.mark.parametrize(
    ("size", "vocabulary", "expected"),
    [
        # GPT-2 itself: 124,439,808, and 47 more tokens.
        ("125m", GPT_2, 124_439_808 + 47 * 768),
        ("350m", GPT_2, 354_871_296),
        ("125m", TOKENS, 92_133_888),
        ("350m", TOKENS, 311_748_608),
    ],
)
def test_a_model_has_the_documented_size(size: str, vocabulary: int, expected: int) -> None:
    task = GPT(size, vocabulary)
    with torch.device("meta"):
        layers = nn.ModuleDict({name: build() for name, build in task.layers().items()})
    named = dict(layers.named_parameters())
    for copy, owner in task.tied().items():
        assert named.pop(copy).shape == named[owner].shape == (math.ceil(vocabulary / 64) * 64, task.size.width)
    assert sum(value.numel() for value in named.values()) == expected
    assert not list(layers.buffers())


def test_a_size_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"args\.size is 'huge'; expected one of tiny, 125m, 350m"):
        GPT("huge")


def tokens(rows: int, below: int = TOKENS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"tokens": torch.randint(0, below, (rows, ROW), dtype=torch.int32, generator=generator)}


def test_an_untrained_one_guesses_from_the_beginning_of_rows() -> None:
    task = GPT("tiny")
    model = build_model(task, 0, CPU).module
    batch = tokens(4)
    loss = task.loss(model, batch)
    assert float(loss.detach()) == pytest.approx(math.log(TOKENS), abs=0.1)
    short = {"tokens": batch["tokens"][:, : SIZES["tiny"].context + 1]}
    assert torch.equal(task.loss(model, short), loss)


class CountsOn(nn.Module):
    """A model that predicts with certainty that each token is followed by the next larger one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (50.0 * nn.functional.one_hot((x + 1) % TOKENS, TOKENS)).bfloat16()


def test_the_loss_is_about_the_next_token_and_in_32_bits() -> None:
    counting = {"tokens": torch.arange(ROW, dtype=torch.int32).expand(2, -1)}
    standing = {"tokens": torch.zeros(2, ROW, dtype=torch.int32)}
    assert float(GPT("tiny").loss(CountsOn(), counting)) < 1e-6
    assert float(GPT("tiny").loss(CountsOn(), standing)) == pytest.approx(50.0)
    assert GPT("tiny").loss(CountsOn(), standing).dtype == torch.float32


def test_weight_decay_is_for_matrices_and_the_rate_warms_up_and_falls() -> None:
    task = GPT("tiny")
    task.run = RunFacts(total_steps=40, batch_size=128)
    model = build_model(task, 0, CPU).module
    optimizer = task.optimizer(model.named_parameters())
    decayed, free = optimizer.param_groups
    assert decayed["weight_decay"] > 0 == free["weight_decay"]
    assert ({value.dim() for value in decayed["params"]}, {value.dim() for value in free["params"]}) == ({2}, {1})
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    scheduler = task.scheduler(optimizer)
    rates = []
    for _ in range(40):
        rates.append(scheduler.get_last_lr()[0] / SIZES["tiny"].lr)
        optimizer.step()
        scheduler.step()
    assert rates[:2] == pytest.approx([0.5, 1.0])
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.1 < rates[-1] < 0.11


def test_tiny_learns_a_pattern_and_its_head_keeps_the_values_of_its_tokens() -> None:
    task = GPT("tiny", vocabulary=100)
    task.run = RunFacts(total_steps=30, batch_size=4)
    assert task.vocabulary == 128
    state = TrainState(task, [build_model(task, 0, CPU)], Summing(1), seed=0, technique=Technique(clip_norm=1.0))
    steps = whole_steps(state)
    text = {"tokens": torch.arange(ROW, dtype=torch.int32).remainder(7).expand(4, -1)}
    losses = [steps.run(step, {0: [Microbatch(text, 4)]}, context(SoloWorld())).loss for step in range(30)]
    assert losses[0] == pytest.approx(math.log(128), abs=0.2)
    assert losses[-1] < 0.5
    named = dict(state.module.named_parameters())
    assert torch.equal(named["head.out.weight"], named["embed.token.weight"])
    assert not torch.equal(named["head.out.weight"], build_model(task, 0, CPU).module.head.out.weight)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with forty modules, and let the tokenizer have 300 tokens: those of bytes, and some more."""
    monkeypatch.setattr(gpt, "TOKENS", 300)
    for number in range(40):
        word = "unheard" if held_out(f"module{number}.py") else "training"
        text = f"# file {number}: \u00e9\n" + f"{word} = {word} + 1\n" * 90
        (tmp_path / f"module{number}.py").write_text(text, "utf-8")
    assert 0 < sum(map(held_out, sources(tmp_path))) < 40
    return tmp_path


def written(folder: Path, name: str, library: Path) -> dict[str, str]:
    folder.mkdir()
    prepare(folder, name, library)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_rows_hold_the_files_of_their_split_one_after_the_other(library: Path) -> None:
    for name in ("train", "held_out"):
        folder = library / "site-packages" / name
        folder.parent.mkdir(exist_ok=True)
        written(folder, name, library)
        table = pq.read_table(folder / "rows.parquet")
        assert table.schema.field("tokens").type == pa.list_(pa.int32(), ROW)
        tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "_tokenizer.json"))
        found = tokenizer.decode(np.concatenate(table["tokens"].to_numpy()).tolist(), skip_special_tokens=False)
        own = [source for source in sources(library) if held_out(source) == (name == "held_out")]
        expected = "".join((library / source).read_text("utf-8") + END for source in own)
        # The last tokens fill no row; one of them may be a part of a character.
        assert expected.startswith(found.rstrip("\ufffd"))
        assert len(tokenizer.encode(expected[len(found) :]).ids) <= ROW
        assert parquet_source(folder).rows == table.num_rows > 1
        assert without_checksums([folder / "rows.parquet"]) == ()


def test_both_splits_have_the_tokenizer_of_the_training_files_and_the_same_bytes_each_time(library: Path) -> None:
    (library / "site-packages").mkdir()
    made = [
        written(library / "site-packages" / f"{name}{number}", name, library)
        for name in ("train", "held_out")
        for number in range(2)
    ]
    assert made[0] == made[1] != made[2] == made[3]
    assert len({files["_tokenizer.json"] for files in made}) == 1
    text = (library / "site-packages" / "train0" / "_tokenizer.json").read_text()
    assert '"\u0120training"' in text or '"training"' in text
    assert "unheard" not in text


def test_a_tokenizer_gives_back_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "TOKENS", 270)
    tokenizer = trained_tokenizer(["def f(x):\n    return x\n"])
    for text in ("def g(y):\n\treturn y\r\n", "\u00e9 \u65e5\u672c \U0001f600 \x00", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END) == 0


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenizers is not installed: run `pip install '\.\[examples\]'`"):
        trained_tokenizer([])


@pytest.mark.parametrize("size", ["125m", "350m"])
def test_its_job_file_is_a_job(size: str) -> None:
    job, _ = load_job(f"jobs/gpt_{size}.yaml")
    assert (job.task, dict(job.args)) == ("examples.gpt:GPT", {"size": size})
    assert (job.precision, job.recompute, job.compile, job.workers.gpus) == ("bf16", "selective", True, 1)
    assert job.evaluate is not None
    assert Path(job.data.path).parent == Path(job.evaluate.path).parent
