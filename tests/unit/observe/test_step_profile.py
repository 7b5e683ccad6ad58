"""The phases of profiled steps become a table."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus.observe.step_profile import (
    PHASES,
    Change,
    Profiled,
    ProfiledWorker,
    StepProfile,
    Sum,
    hidden_s,
    peak_of,
    phase_seconds,
    table,
)

H100 = "NVIDIA H100 80GB HBM3"


def worker(**changes: Any) -> ProfiledWorker:
    values: dict[str, Any] = {"seat": 0, "device": H100, "trace": "profile/a.json", "operations": None, "peak": None}
    return ProfiledWorker(**{**values, **changes})


def profiled(step: int, of: ProfiledWorker, seconds: float = 0.01, count: int = 1, **phases: float) -> Profiled:
    rest = {"rest": seconds - sum(phases.values())}
    return Profiled(
        step=step,
        count=count,
        seconds=seconds,
        phases={**phases, **rest},
        hidden_s=0.001,
        of=of,  # type: ignore[dict-item]
    )


def test_each_moment_belongs_to_one_phase() -> None:
    changes = [Change(1.0, "rest"), Change(1.5, "data"), Change(2.0, "forward"), Change(4.0, "rest")]
    assert phase_seconds(changes, 4.25) == {"rest": 0.75, "data": 0.5, "forward": 2.0}


@pytest.mark.parametrize(
    ("sums", "seconds"),
    [
        ([], 0.0),
        ([Sum(1.0, 2.0)], 1.0),
        ([Sum(1.0, 2.0), Sum(1.5, 1.75), Sum(3.0, 3.5)], 1.5),
        # What is under way after the last backward pass is not hidden.
        ([Sum(3.0, 9.0), Sum(5.0, 8.0)], 1.0),
    ],
)
def test_a_sum_is_hidden_up_to_the_end_of_the_last_backward_pass(sums: list[Sum], seconds: float) -> None:
    changes = [Change(0.0, "backward"), Change(2.0, "forward"), Change(3.0, "backward"), Change(4.0, "exposed")]
    assert hidden_s(changes, 9.0, reversed(sums)) == seconds


def test_without_a_backward_pass_nothing_is_hidden() -> None:
    assert hidden_s([Change(0.0, "exposed")], 9.0, [Sum(1.0, 2.0)]) == 0.0


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp16", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        (H100, "bf16-params", 989.5e12),
        (H100, "tf32", 989.5e12 / 2),
        (H100, "fp32", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", None),
        ("a CPU", "bf16", None),
    ],
)
def test_the_peak_of_a_device(device: str, precision: str, peak: float | None) -> None:
    assert peak_of(device, precision) == peak


def test_the_table_has_means_of_committed_steps_and_the_mfu() -> None:
    profile = StepProfile()
    fast, slow = worker(operations=4 * 10**12, peak=1e15), worker(seat=1, no_mfu="the peak is not known")
    # A step that is recomputed counts once.
    profile.add("a", profiled(3, fast, 9.0))
    profile.add("b", profiled(3, slow, 0.02, backward=0.005))
    profile.add("a", profiled(3, fast, 0.01, forward=0.002))
    profile.add("a", profiled(4, fast, 0.03, forward=0.004, data=0.01))
    profile.add("a", profiled(5, fast, 9.0))
    found = profile.to_json(last_step=4)
    assert found is not None
    first, second = found["workers"]
    assert [row["worker"] for row in found["workers"]] == ["a", "b"]
    assert (first["steps"], first["step_ms"], first["forward_ms"], first["data_ms"]) == ([3, 4], 20.0, 3.0, 5.0)
    assert first["step_ms"] == pytest.approx(sum(first[f"{phase}_ms"] for phase in PHASES))
    assert first["mfu"] == pytest.approx(4e12 / (0.02 * 1e15))
    assert (second["mfu"], second["no_mfu"]) == (None, "the peak is not known")
    assert table(found) == [
        "  profile  mean milliseconds of steps 3 to 4; the hidden reduction is a part of the passes",
        "    worker   step  forward  backward  hidden  exposed  optimizer  data   rest     MFU",
        "    a       20.00     3.00      0.00    1.00     0.00       0.00  5.00  12.00  20.0 %",
        "    b       20.00     0.00      5.00    1.00     0.00       0.00  0.00  15.00       -",
        "    MFU: counted matrix products, convolutions and attention, forward and backward, without recomputation",
        "    no MFU: the peak is not known",
    ]
    assert profile.to_json(last_step=2) is None


def test_overlapping_steps_count_as_many_and_stages_have_a_column() -> None:
    profile = StepProfile()
    profile.add("a", profiled(3, worker(), 0.01, count=3))
    profile.add("a", profiled(4, worker(), 0.05, stages=0.02))
    found = profile.to_json(last_step=9)
    assert found is not None
    assert (found["workers"][0]["step_ms"], found["workers"][0]["stages_ms"]) == (20.0, 5.0)
    assert "stages" in table(found)[1]
