"""The benchmark of a GPU runs in small on a CPU, and measures nothing where there is no GPU."""

from __future__ import annotations

import re

import pytest
import torch

from examples.gpt import Size
from tests.benchmarks import gpu


def test_a_small_model_on_a_cpu_gives_a_row_for_each_contestant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    # Some processors take seconds for a step of bfloat16 passes, even of the tiny model.
    monkeypatch.setitem(gpu.SIZES, "tiny", Size(depth=1, width=16, heads=2, context=8, lr=2e-3))
    small = ["--size", "tiny", "--device", "cpu", "--mode", "eager", "--rounds", "1", "--steps", "1"]
    assert gpu.main(small) == 0
    printed = capsys.readouterr().out
    for one in gpu.CONTESTANTS:
        assert re.search(rf"(?m)^{one.name} +[\d.]+ +[\d,]+ +- +[\d.]+ +[\d.]+$", printed), one.name
    assert not torch.are_deterministic_algorithms_enabled()


def test_all_are_the_usual_ones_and_every_combination() -> None:
    assert gpu.ALL[: len(gpu.CONTESTANTS)] == gpu.CONTESTANTS
    own = [one for one in gpu.ALL if not one.plain]
    assert {(one.shards, one.exact, one.clip) for one in own} == {
        (shards, exact, clip) for shards in (1, 4, 12) for exact in (False, True) for clip in (False, True)
    }
    assert len(own) == len(set(own)) == 12


@pytest.mark.slow
def test_a_contestant_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def own_loop(setting: gpu.Setting, one: gpu.Contestant, clip_norm: float | None) -> gpu.Step:
        if one.exact:
            raise RuntimeError("out of memory\nand more")
        return lambda number: None

    monkeypatch.setattr(gpu, "own_loop", own_loop)
    monkeypatch.setattr(gpu, "plain_loop", lambda *_: (lambda number: None, 7))
    assert gpu.main(["--size", "tiny", "--device", "cpu", "--mode", "eager", "--rounds", "1", "--steps", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^1 shard, exact +failed: RuntimeError: out of memory$", printed)
    assert re.search(r"(?m)^4 shards, ring +[\d.]+", printed)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == f"torch {torch.__version__} sees no GPU here: nothing is measured\n"


def test_mfu_is_by_the_usual_formula() -> None:
    setting = gpu.Setting("406m", torch.device("cpu"), False)
    with torch.device("meta"):
        layers = torch.nn.ModuleDict({name: build() for name, build in setting.task().layers().items()})
    parameters = sum(value.numel() for value in layers.parameters())
    assert parameters == pytest.approx(406e6, rel=0.01)
    # Half the peak: 24 rows of 1024 tokens.
    seconds = 24 * 1024 * (6 * parameters + 12 * 24 * 1024 * 1024) / (989.5e12 / 2)
    text = gpu.row("one", [seconds] * 3, [2 * seconds] * 3, setting, parameters, 989.5e12)
    assert text.split()[3:6] == ["50.0", "%", "2.000"]
