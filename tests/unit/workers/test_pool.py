"""The cause of a worker's death in a few words, and workers without Ray's GCS."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from raytrain_plus.errors import Interrupted, RunError, StaleController
from raytrain_plus.membership.timeouts import ANSWER_S, START_S
from raytrain_plus.workers import pool
from raytrain_plus.workers.imports import Imports
from raytrain_plus.workers.pool import LOOK_S, Pool, answer, cause_of_death

RUN = "digits/0a1b2c3d"


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


class TheirTimeoutError(RayTaskError, TimeoutError):  # type: ignore[misc]
    """A worker's own timeout, as Ray raises it here."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def test_a_workers_own_timeout_is_not_taken_for_a_missing_answer() -> None:
    future: Future[Any] = Future()
    future.set_exception(TheirTimeoutError(TimeoutError("its storage did not answer")))
    with pytest.raises(TimeoutError, match="its storage did not answer"):
        answer(future, "worker-1")
    with pytest.raises(Interrupted, match=r"worker-1 did not answer within 0\.01 s"):
        answer(Future(), "worker-1", 0.01)


def test_a_ray_without_its_gcs_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its GCS, Ray waits a minute for each worker: a run had ended, and nobody was told."""
    asked, answers = [], threading.Event()

    def wait(asked_for: Any) -> None:
        asked.append(asked_for)
        answers.wait(1000)

    monkeypatch.setattr(pool, "remove", wait)
    monkeypatch.setattr(pool, "clear", wait)
    monkeypatch.setattr(pool, "end_actor", lambda actor: None)
    monkeypatch.setattr(pool, "FREE_S", 0.2)
    workers = Pool(RUN, 1, 0, Imports(), wait_s=60)
    workers._handles = {name: pool.WorkerHandle(None, name) for name in ("a", "b", "c")}  # type: ignore[arg-type]
    workers.end("a")
    workers.shutdown()
    # Neither waited for Ray.
    assert not answers.is_set()
    answers.set()
    assert sorted(asked) == ["a", "b", "c", RUN]


def test_a_worker_that_cannot_be_started_without_the_gcs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise GetTimeoutError("There was timeout in creating the placement group")

    monkeypatch.setattr(pool, "placement_group", late)
    with pytest.raises(RunError, match="Ray's GCS does not answer, so worker-1 cannot be started"):
        Pool(RUN, 1, 0, Imports(), wait_s=60).start("worker-1")


def test_what_a_worker_needs_is_spelled() -> None:
    assert Pool(RUN, 1, 0, Imports(), wait_s=60).need == "1 CPU"
    assert Pool(RUN, 0.5, 1, Imports(), wait_s=60).need == "0.5 CPU, 1 GPU"
    assert Pool(RUN, 0, 0, Imports(), wait_s=60).need == "nothing"
    assert Pool(RUN, 1, 1, Imports(), accelerator="H100", wait_s=60).need == "1 CPU, 1 GPU, a node with H100"


def test_a_worker_is_placed_on_a_node_with_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def group(bundles: Any, **_: Any) -> None:
        asked.extend(bundles)
        raise GetTimeoutError("enough")

    monkeypatch.setattr(pool, "placement_group", group)
    for accelerator in (None, "H100"):
        with pytest.raises(RunError):
            Pool(RUN, 1, 1, None, accelerator=accelerator, wait_s=60).start("worker-1")
    assert asked == [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}]


NODE = "ab" * 28


def named(actor: Any) -> tuple[Any, ...]:
    """Return the name of the worker and of its place that an actor was started with; none for a standby."""
    return actor.arguments[1:]


class Started:
    """A remote class whose actors are recorded, with the options that they were started with."""

    def __init__(self) -> None:
        self.actors: list[Any] = []

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments, cpus=None: self._start(options, arguments, cpus))

    def _start(self, options: dict[str, Any], arguments: tuple[Any, ...], cpus: float | None) -> Any:
        method = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future))
        answers = dict[str, Future[Any]](load=Future(), respond=Future())
        asked = {
            name: SimpleNamespace(remote=lambda *_, one=one: SimpleNamespace(future=lambda: one))
            for name, one in answers.items()
        }
        actor = SimpleNamespace(
            arguments=arguments,
            options=options,
            strategy=options["scheduling_strategy"],
            cpus=(options["num_cpus"], cpus),
            live=method,
            answers=answers,
            became=[],
            **asked,
        )
        actor.become = SimpleNamespace(remote=lambda *given: actor.became.append(given))
        self.actors.append(actor)
        return actor


@pytest.fixture
def time_of() -> SimpleNamespace:
    """Return the clock of the pool, which stands still until a test moves it."""
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, time_of: SimpleNamespace) -> tuple[Pool, Started, list[Any]]:
    """Return a pool of workers a and b on one node, with a standby there; its actors; and the groups freed so far."""
    groups, freed, made = iter("ABCDE"), list[Any](), Started()
    monkeypatch.setattr(pool, "placement_group", lambda *_, **__: next(groups))
    monkeypatch.setattr(pool, "PlacementGroupSchedulingStrategy", lambda group, _: group)
    monkeypatch.setattr(pool, "_freed", lambda place: (freed.append(place.group), threading.Thread())[1])
    monkeypatch.setattr(pool.ray, "kill", lambda actor: None)
    monkeypatch.setattr(pool.ray, "remote", lambda cls: made)
    workers = Pool(RUN, 1, 0, Imports(), lambda: time_of.now, wait_s=60)
    for name in ("a", "b"):
        workers.start(name)
    workers.stand_by({"a": NODE, "b": NODE})
    return workers, made, freed


@pytest.fixture
def killed(started: tuple[Pool, Started, list[Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the actors that the pool has killed so far."""
    actors: list[Any] = []
    monkeypatch.setattr(pool.ray, "kill", actors.append)
    return actors


def test_a_standby_takes_the_place_of_a_worker_whose_process_died(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, made, freed = started
    workers.end("b", vacate=True)
    workers.start("c")
    [_, _, standby] = made.actors
    assert workers.actor("c") is standby
    assert (named(standby), standby.became, standby.strategy.node_id) == ((), [("c", f"{RUN}/b#0")], NODE)
    assert not freed
    # The place is the new worker's.
    workers.release("b")
    assert not freed
    workers.end("c")
    assert freed == ["B"]


def test_a_standby_that_does_not_answer_is_replaced_in_the_place_that_it_took(
    time_of: SimpleNamespace, started: tuple[Pool, Started, list[Any]], killed: list[Any]
) -> None:
    workers, made, freed = started
    [_, b, standby] = made.actors
    standby.answers["load"].set_result(None)
    workers.end("b", vacate=True)
    time_of.now += ANSWER_S / 2
    workers.start("c")
    assert (workers.actor("c"), workers.start_left_s("c")) == (standby, ANSWER_S / 2)
    time_of.now += ANSWER_S / 2
    assert workers.start_left_s("c") == 0
    workers.restart("c")
    new = made.actors[3]
    assert (workers.actor("c"), named(new), new.strategy) == (new, ("c", f"{RUN}/b#0"), "B")
    assert (killed, freed) == ([b, standby], [])
    assert workers.start_left_s("c") == START_S


def test_a_standby_that_answered_has_the_limit_of_any_start(
    time_of: SimpleNamespace, started: tuple[Pool, Started, list[Any]]
) -> None:
    workers, made, _ = started
    for answered in made.actors[2].answers.values():
        answered.set_result(None)
    workers.end("b", vacate=True)
    time_of.now += 2 * ANSWER_S
    workers.start("c")
    assert (workers.actor("c"), workers.start_left_s("c")) == (made.actors[2], START_S)


def test_a_standby_that_has_not_answered_by_then_is_ended_and_leaves_its_place_to_a_new_process(
    time_of: SimpleNamespace, started: tuple[Pool, Started, list[Any]], killed: list[Any]
) -> None:
    workers, made, _ = started
    made.actors[2].answers["load"].set_result(None)
    workers.end("b", vacate=True)
    time_of.now += ANSWER_S
    workers.start("c")
    assert (named(made.actors[3]), made.actors[3].strategy) == (("c", f"{RUN}/b#0"), "B")
    assert killed == made.actors[1:3]


def test_a_process_that_does_not_come_up_is_replaced_and_the_next_one_has_twice_the_time(
    time_of: SimpleNamespace, started: tuple[Pool, Started, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Future[bool]] = []

    def asked(group: Any) -> Future[bool]:
        answers.append(Future())
        return answers[-1]

    monkeypatch.setattr(pool, "_asked_for_room", asked)
    workers = started[0]
    workers.start("c")
    for _ in range(3):
        # Ray has not answered, and is not asked again; without room there is nothing to replace.
        assert (workers.start_left_s("c"), len(answers)) == (LOOK_S, 1)
        assert not workers.lacks_room("c")
        time_of.now += START_S
    answers[0].set_result(False)
    assert (workers.start_left_s("c"), len(answers)) == (LOOK_S, 2)
    assert workers.lacks_room("c")
    answers[1].set_result(True)
    assert workers.start_left_s("c") == START_S
    assert not workers.lacks_room("c")
    time_of.now += START_S
    assert workers.start_left_s("c") == 0
    workers.restart("c")
    assert workers.start_left_s("c") == 2 * START_S


def test_nobody_waits_for_the_answer_whether_there_is_room(
    started: tuple[Pool, Started, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its GCS, Ray never answers."""
    over = threading.Event()
    monkeypatch.setattr(pool, "placement_group_table", lambda group: over.wait(1000) and {})
    workers = started[0]
    workers.start("c")
    assert [workers.start_left_s("c") for _ in range(2)] == [LOOK_S] * 2
    over.set()


def test_an_answer_of_a_process_that_was_replaced_is_not_the_workers(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, made, _ = started
    asked: list[Future[Any]] = []

    def call(*_: Any) -> Any:
        asked.append(Future())
        return SimpleNamespace(future=lambda: asked[-1])

    got: list[Any] = []
    for actor in made.actors:
        actor.call = SimpleNamespace(remote=call)
    workers.ask("a", got.append, "location")
    workers.restart("a")
    asked[0].set_result("its location")
    assert not got


def test_the_end_of_a_process_that_was_replaced_is_not_the_workers(
    started: tuple[Pool, Started, list[Any]],
) -> None:
    workers, made, _ = started
    lives: list[Future[Any]] = []

    def live(epoch: int) -> Any:
        lives.append(Future())
        return SimpleNamespace(future=lambda: lives[-1])

    died: list[Any] = []
    for actor in made.actors:
        actor.live = SimpleNamespace(remote=live)
    workers.watch("a", died.append)
    workers.restart("a")
    lives[0].set_exception(RayActorError(error_msg="killed"))
    assert not died
    made.actors[-1].live = SimpleNamespace(remote=live)
    workers.watch("a", died.append)
    lives[1].set_exception(RayActorError(error_msg="killed"))
    assert died == lives[1:]


def test_two_workers_that_died_leave_two_places_and_one_standby(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, made, freed = started
    for name in ("a", "b"):
        workers.end(name, vacate=True)
    for name in ("c", "d"):
        workers.start(name)
    assert workers.actor("c") is made.actors[2]
    assert (named(made.actors[3]), made.actors[3].strategy) == (("d", f"{RUN}/b#0"), "B")
    assert not freed


def test_a_place_that_nobody_takes_is_freed(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, made, freed = started
    workers.end("b", vacate=True)
    workers.release("b")
    assert freed == ["B"]
    workers.start("c")
    assert made.actors[3].strategy == "C"


def test_the_place_of_a_worker_that_was_dismissed_is_freed_at_once(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, _, freed = started
    workers.end("b")
    assert freed == ["B"]


def test_a_standby_takes_no_cpus_and_knows_how_many_the_worker_has(started: tuple[Pool, Started, list[Any]]) -> None:
    made = started[1]
    workers = Pool(RUN, 2, 0, Imports(), wait_s=60)
    workers.start("e")
    workers.stand_by({"e": NODE})
    assert [actor.cpus for actor in made.actors[3:]] == [(2, None), (0, 2)]
    workers.end("e", vacate=True)
    workers.start("f")
    assert (workers.actor("f"), started[2]) == (made.actors[4], [])


@pytest.mark.parametrize(("cpus", "gpus", "imports"), [(1, 1, Imports()), (1, 0, None)])
def test_workers_with_a_gpu_or_by_request_have_no_standby(
    started: tuple[Pool, Started, list[Any]], cpus: int, gpus: int, imports: Imports | None
) -> None:
    made = started[1]
    workers = Pool(RUN, cpus, gpus, imports, wait_s=60)
    workers.start("e")
    workers.stand_by({"e": NODE})
    assert len(made.actors) == 4
    workers.end("e", vacate=True)
    assert started[2] == ["C"]


def test_an_error_of_ray_leaves_no_question_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def broken(group: Any) -> Any:
        raise ValueError("no such group")

    monkeypatch.setattr(pool, "placement_group_table", broken)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    assert pool._asked_for_room(None).result(5) is False  # type: ignore[arg-type]


def test_a_controller_that_was_replaced_ends_nobody(
    started: tuple[Pool, Started, list[Any]], killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, made, freed = started
    names = dict(zip("ab", made.actors, strict=False))
    for actor in names.values():
        actor.standing = SimpleNamespace(remote=lambda *_: object())
    monkeypatch.setattr(pool, "actors_of", lambda run: names)
    monkeypatch.setattr(pool, "places_of", lambda run: [])
    monkeypatch.setattr(pool.ray, "wait", lambda refs, num_returns, timeout: (refs, []))

    def get(reference: Any) -> Any:
        raise TheirTimeoutError(StaleController("controller 1 is refused"))

    monkeypatch.setattr(pool.ray, "get", get)
    with pytest.raises(StaleController):
        workers.adopt(1, 0.1)
    assert (killed, freed) == ([], [])


def test_no_name_is_taken_twice(started: tuple[Pool, Started, list[Any]]) -> None:
    workers, made, _ = started
    workers.end("b", vacate=True)
    workers.start("c")
    workers.restart("c")
    again = Pool(RUN, 1, 0, Imports(), epoch=1, wait_s=60)
    again.start("c")
    names = [actor.options["name"] for actor in made.actors]
    assert names == [f"{RUN}/{name}" for name in ("a#0.0", "b#0.1", "standby-2#0.3", "c#0.4", "c#1.0")]
    assert {actor.options["lifetime"] for actor in made.actors} == {"detached"}


def test_workers_and_standbys_know_how_long_they_wait_for_a_controller(
    started: tuple[Pool, Started, list[Any]],
) -> None:
    assert [actor.arguments[0].wait_s for actor in started[1].actors] == [60] * 3
