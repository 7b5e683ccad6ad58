"""Stages whose workers send to each other by NCCL, with a stand-in for it: the bits of one worker."""

from __future__ import annotations

import pytest
import torch

from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from tests.support import overlapping, stages
from tests.support.stages import check_alike, one_computes_at_a_time
from tests.unit.training.linked import Linked, by_nccl

__all__ = ["by_nccl", "one_computes_at_a_time"]


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved", "zero-bubble", pytest.param("gpipe", marks=pytest.mark.slow)]
)
def test_stages(schedule: Schedule, by_nccl: None) -> None:
    shape = Shape(2, 4)
    linked = Linked(schedule, shape)
    expected = stages.alone(exact=True)
    check_alike(stages.together(shape, schedule, exact=True, threads=linked), shape, expected)
    # Each link carried something, and nothing went another way.
    assert linked.carried == set(linked.directions)


def test_steps_that_overlap(by_nccl: None) -> None:
    shape, windows = Shape(2, 2), [range(3), range(3, 5)]
    through_host = overlapping.together(shape, windows)
    linked = Linked("pipedream", shape)
    found = overlapping.together(shape, windows, threads=linked)
    for (told, weights, _), (expected, bits, _) in zip(found, through_host, strict=True):
        assert told == expected
        assert all(torch.equal(weights[name], bits[name]) for name in bits)
    assert linked.carried == set(linked.directions)
