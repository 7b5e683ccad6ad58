"""A request for other numbers of workers says what it changes."""

from __future__ import annotations

import pytest

from raytrain_plus import Data, Job, Workers
from raytrain_plus.controller.rescaling import effect, requested
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.sizes import SizeTable


@pytest.mark.parametrize(
    ("maximum", "said"),
    [
        (2, "nothing changes: the run has workers.min 1, max 2, spares 0 already"),
        (4, "2 train now; more join at a step boundary as soon as the cluster has room for them"),
        (3, "at most 2 of workers.max = 3 are used: with data.shards = 4 one more would make no step faster"),
        (1, "the run has workers.min 1, max 1, spares 0 from now on, and 2 train now"),
    ],
)
def test_a_request_says_what_it_changes_or_why_it_changes_nothing(maximum: int, said: str) -> None:
    job = Job(name="x", task="a:B", data=Data(path="d", batch_size=8, shards=4), steps=3, workers=Workers(min=1, max=2))
    now = Limits(sizes=SizeTable(1, 2, 4), spares=0, steps=3, max_failures=None, expected=2)
    assert said in effect(now, requested(job, now, None, maximum, None), 2)
