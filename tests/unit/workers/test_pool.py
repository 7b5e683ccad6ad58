"""Ray's long messages, in a few words."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnavailableError, RayActorError

from raytrain_plus.workers.pool import Pool, cause_of_death


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RayActorError(error_msg="The actor died.\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
            "process was killed by the OOM killer due to high memory usage"),
            "its process was killed or crashed",
        ),
        (
            RayActorError(error_msg="The actor died. Worker exit type: NODE_OUT_OF_MEMORY"),
            "out of memory: its node ran low, and Ray ended it",
        ),
        (RayActorError(error_msg="The actor died because its node has died. Node Id: ab"), "its node is gone"),
        (ActorUnavailableError("The actor is temporarily unavailable", b"\0" * 16), "its node is gone"),
        (ActorPlacementGroupRemoved(), "its place was taken away"),
        (RayActorError(error_msg="Something new\nits cause: rust"), "its cause: rust"),
        (RayActorError(error_msg="Something new"), "Something new"),
    ],
)  # fmt: skip
def test_a_death_has_a_cause(error: Exception, cause: str) -> None:
    assert cause_of_death(error) == cause


def test_what_a_worker_needs_is_spelled() -> None:
    assert Pool(1, 0).need == "1 CPU"
    assert Pool(0.5, 1).need == "0.5 CPU, 1 GPU"
    assert Pool(0, 0).need == "nothing"
