"""The cause of a worker's death in a few words, and workers without Ray's GCS."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnavailableError, GetTimeoutError, RayActorError

from raytrain_plus.errors import RunError
from raytrain_plus.workers import pool
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
        (ActorPlacementGroupRemoved(), "its placement group was removed"),
        (RayActorError(error_msg="Something new\nits cause: rust"), "its cause: rust"),
        (RayActorError(error_msg="Something new"), "Something new"),
    ],
)  # fmt: skip
def test_a_death_has_a_cause(error: Exception, cause: str) -> None:
    assert cause_of_death(error) == cause


def test_a_ray_without_its_gcs_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its GCS, Ray waits a minute for each worker: a run had ended, and nobody was told."""
    asked, answers = [], threading.Event()

    def wait(group: Any) -> None:
        asked.append(group)
        answers.wait(60)

    monkeypatch.setattr(pool, "remove_placement_group", wait)
    monkeypatch.setattr(pool.ray, "kill", lambda actor: None)
    monkeypatch.setattr(pool, "FREE_S", 0.2)
    workers = Pool(1, 0)
    workers._handles = {name: pool.WorkerHandle(None, name) for name in ("a", "b", "c")}  # type: ignore[arg-type]
    began = time.monotonic()
    workers.end("a")
    assert time.monotonic() - began < 1
    workers.shutdown()
    assert time.monotonic() - began < 2
    answers.set()
    assert sorted(asked) == ["a", "b", "c"]


def test_a_worker_that_cannot_be_started_without_the_gcs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise GetTimeoutError("There was timeout in creating the placement group")

    monkeypatch.setattr(pool, "placement_group", late)
    with pytest.raises(RunError, match="Ray's GCS does not answer, so worker-1 cannot be started"):
        Pool(1, 0).start("worker-1")


def test_what_a_worker_needs_is_spelled() -> None:
    assert Pool(1, 0).need == "1 CPU"
    assert Pool(0.5, 1).need == "0.5 CPU, 1 GPU"
    assert Pool(0, 0).need == "nothing"
