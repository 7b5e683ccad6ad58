"""A worker obeys the newest controller, and calls of those before use up none of its threads."""

from __future__ import annotations

import threading

import pytest

from raytrain_plus.errors import StaleController
from raytrain_plus.workers.epochs import PEER, Epochs
from raytrain_plus.workers.worker_actor import WorkerActor


def test_calls_of_an_older_controller_are_refused() -> None:
    epochs = Epochs()
    for epoch in (0, 3, PEER, 3, 5, PEER):
        epochs.admit(epoch)
    with pytest.raises(StaleController, match="controller 3 is refused: controller 5 has taken over"):
        epochs.admit(3)
    with pytest.raises(StaleController):
        epochs.wait(4)


def test_endless_calls_of_many_controllers_end_with_them() -> None:
    actor = WorkerActor(None)
    threads = [threading.Thread(target=actor.live, args=(epoch,), daemon=True) for epoch in range(40)]
    for thread in threads:
        thread.start()
        while not thread.is_alive():
            pass
    actor.standing(40, None)  # type: ignore[arg-type]
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(StaleController):
        actor.call(39, "location")
