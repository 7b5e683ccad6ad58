"""The byte GPT example: its model, and the data that it prepares."""

import doctest
import hashlib
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from examples import byte_gpt
from examples.byte_gpt import CONTEXT, VOCABULARY, ByteGPT, held_out, prepare, printable, sources
from raytrain_plus import RunFacts
from raytrain_plus.data.paths.page_checksum import without_checksums
from raytrain_plus.job.yaml import load_job

WIDTH, DEPTH = 128, 4


def whole(task: ByteGPT) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(build() for build in task.layers().values()))


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"bytes": torch.randint(0, 256, (rows, CONTEXT + 1), dtype=torch.uint8, generator=generator)}


def test_the_model_has_the_documented_size() -> None:
    model = whole(ByteGPT())
    block = 12 * WIDTH**2 + 13 * WIDTH
    expected = (VOCABULARY + CONTEXT) * WIDTH + DEPTH * block + 2 * WIDTH + WIDTH * VOCABULARY
    assert sum(value.numel() for value in model.parameters()) == expected == 875_264
    assert not list(model.buffers())


def test_each_layer_takes_the_output_of_the_previous_one() -> None:
    layers = ByteGPT().layers()
    assert list(layers) == ["embed", "block0", "block1", "block2", "block3", "head"]
    text = batch(2)["bytes"][:, :-1].long()
    model = whole(ByteGPT()).eval()
    x = text
    for layer, shape in zip(model, [(2, CONTEXT, WIDTH)] * 5 + [(2, CONTEXT, VOCABULARY)], strict=True):
        x = layer(x)
        assert x.shape == shape
    assert torch.equal(x, model(text))


def test_an_untrained_one_guesses() -> None:
    task = ByteGPT()
    model = whole(task).eval()
    with torch.no_grad():
        told = task.evaluate(model, batch(8))
    assert float(task.loss(model, batch(8)).detach()) == float(told["loss"]) == pytest.approx(math.log(256), abs=0.1)
    assert float(told["bits_per_byte"]) == pytest.approx(8.0, abs=0.15)


class CountsOn(nn.Module):
    """A model that predicts with certainty that each byte is followed by the next larger one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 50.0 * nn.functional.one_hot((x + 1) % VOCABULARY, VOCABULARY).float()


def test_the_loss_is_about_the_next_byte_not_the_present_one() -> None:
    counting = {"bytes": torch.arange(CONTEXT + 1, dtype=torch.uint8).expand(2, -1)}
    standing = {"bytes": torch.zeros(2, CONTEXT + 1, dtype=torch.uint8)}
    assert float(ByteGPT().loss(CountsOn(), counting)) < 1e-6
    assert float(ByteGPT().loss(CountsOn(), standing)) == pytest.approx(50.0)


def test_no_byte_sees_later_bytes() -> None:
    model = whole(ByteGPT()).eval()
    text = batch(1)["bytes"][:, :-1].long()
    other = text.clone()
    other[0, 60:] = 255 - other[0, 60:]
    before, after = model(text)[0], model(other)[0]
    assert torch.allclose(before[:60], after[:60], atol=1e-5)
    assert not torch.allclose(before[60], after[60], atol=1e-3)


def test_a_shorter_text_is_accepted() -> None:
    assert whole(ByteGPT()).eval()(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, VOCABULARY)


def test_weight_decay_is_for_matrices_and_the_rate_warms_up_and_falls() -> None:
    task = ByteGPT(lr=1.0, warmup=4)
    task.run = RunFacts(total_steps=12, batch_size=48)
    model = whole(task)
    optimizer = task.optimizer(model.named_parameters())
    decayed, free = optimizer.param_groups
    assert decayed["weight_decay"] > 0 == free["weight_decay"]
    assert {value.dim() for value in decayed["params"]} == {2}
    assert {value.dim() for value in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    scheduler = task.scheduler(optimizer)
    rates = []
    for _ in range(14):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[4:13] == sorted(rates[4:13], reverse=True)
    assert rates[12:] == pytest.approx([0.1, 0.1])


def test_a_few_steps_learn_a_pattern() -> None:
    task = ByteGPT(width=32, depth=2, lr=5e-3, warmup=2, dropout=0.0)
    model = whole(task)
    optimizer = task.optimizer(model.named_parameters())
    text = {"bytes": torch.arange(CONTEXT + 1, dtype=torch.uint8).remainder(7).expand(4, -1)}
    for _ in range(30):
        optimizer.zero_grad()
        loss = task.loss(model, text)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.0


def test_the_shown_text_is_a_function_of_the_weights() -> None:
    task = ByteGPT(width=16, depth=1)
    model = whole(task).eval()
    with torch.no_grad():
        said = task.show(model)
        torch.manual_seed(99)
        assert task.show(model) == said
    assert said.startswith("def ")
    assert all(c.isprintable() or c == "\n" for c in said)
    assert len(said) >= 300


def test_the_shown_text_has_no_control_characters() -> None:
    assert printable(b"a\n\x1b[2J\t\r\x00\xff\xc3\xa9\xe2\x80\xa8") == "a\n\\x1b[2J\\t\\r\\x00\\xffé\\u2028"
    assert doctest.testmod(byte_gpt).failed == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sixty source files of known sizes, and some that must be left out."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(60):
        (folder / f"pack{number % 3}").mkdir(exist_ok=True)
        text = (f"# file {number}\n" + "x = 1\n" * 200).encode()
        (folder / f"pack{number % 3}" / f"module{number}.py").write_bytes(text)
    for odd in (
        "test/test_it.py",
        "pack0/tests/test_it.py",
        "site-packages/torch.py",
        "idlelib/idle.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
    ):
        (folder / odd).parent.mkdir(exist_ok=True)
        (folder / odd).write_bytes(b"left out\n" * 100)
    (folder / "short.py").write_bytes(b"x = 1\n")
    return folder


def written(folder: Path, name: str, library: Path) -> dict[str, str]:
    folder.mkdir()
    prepare(folder, name, library)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["train", "held_out"])
def test_the_data_are_the_same_bytes_each_time(tmp_path: Path, library: Path, name: str) -> None:
    first = written(tmp_path / "first", name, library)
    assert first == written(tmp_path / "second", name, library)
    assert len(first) == (1 if name == "held_out" else 4)


def test_every_window_of_every_file_is_in_one_row_of_one_split(tmp_path: Path, library: Path) -> None:
    rows: list[bytes] = []
    for name in ("train", "held_out"):
        written(tmp_path / name, name, library)
        table = pq.read_table(tmp_path / name)
        assert table.schema.field("bytes").type == pa.list_(pa.uint8(), CONTEXT + 1)
        rows += [bytes(row) for row in table.column("bytes").to_pylist()]
    expected = []
    for source in sources(library):
        text = (library / source).read_bytes()
        step = CONTEXT + 1
        expected += [text[at : at + step] for at in range(0, len(text) // step * step, step)]
    assert len(expected) == 60 * 9
    assert sorted(rows) == sorted(expected)


def test_what_differs_between_machines_is_left_out(library: Path) -> None:
    assert sources(library) == sorted([f"pack{n % 3}/module{n}.py" for n in range(60)] + ["short.py"])
    share = sum(held_out(f"pack/module{number}.py") for number in range(2000)) / 2000
    assert 0.04 < share < 0.09


def test_row_groups_are_small(tmp_path: Path, library: Path) -> None:
    (library / "pack0" / "large.py").write_bytes(b"y" * 129 * 9000)
    try:
        written(tmp_path / "train", "train", library)
    finally:
        (library / "pack0" / "large.py").unlink()
    metadata = pq.ParquetFile(tmp_path / "train" / "part-0.parquet").metadata
    assert max(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)) == 512
    assert without_checksums(sorted((tmp_path / "train").iterdir())) == ()


def test_its_job_file_is_a_job() -> None:
    job, _ = load_job("jobs/byte_gpt.yaml")
    assert (job.data.shards, job.data.batch_size, job.task) == (12, 48, "examples.byte_gpt:ByteGPT")
    assert job.evaluate is not None
    assert Path(job.data.path).parent == Path(job.evaluate.path).parent
