"""Which partitions of the model fit the workers, and which layers belong to which stage."""

from __future__ import annotations

import pytest

from raytrain_plus.controller.roster.partitions import Partitions
from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Parallel
from raytrain_plus.membership.mesh import Shape, Stage
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.view import form_view
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.state.stages import REST
from raytrain_plus.workers.messages import WHOLE, PreparedReport, WorkerLocation
from tests.unit.controller.fakes import job_of

LAYERS = (Layer("front", 1.0, 60, parameters=6), Layer("back", 1.0, 50, parameters=5))
FOUR = tuple(Layer(name, 1.0, 1) for name in "abcd")


def partitions(room: int, layers: tuple[Layer, ...] = LAYERS, given: tuple[str, ...] | None = None) -> Partitions:
    """Return the partitions for two workers on one machine, which share `room` bytes."""
    roster = Roster()
    # Another worker was lost before anything began.
    for name in ("a", "b", "lost"):
        roster.record_location(WorkerLocation(worker=name, pid=1, node="n", address="h"))
        roster.prepared(name, PreparedReport(parameters=11, state_bytes=1, layers=layers, room=room))
    job = job_of(1, 3, parallel=Parallel(pipeline=len(given or LAYERS), partition=given))
    return Partitions(job, roster, SizeTable(1, 3, job.data.shards))


def test_partitions_that_do_not_fit_are_dropped_and_the_requested_one_raises() -> None:
    assert partitions(400).fit((2, 1), ["a", "b"]) == ((2, 1), frozenset())
    assert partitions(200).fit((2, 1), ["a", "b"]) == ((2,), frozenset())
    with pytest.raises(InputError, match=r"stage 0 of 2 needs 60 bytes \(the layer 'front': 60 bytes\), .* 50 bytes"):
        partitions(100).fit((2, 1), ["a", "b"])


def test_a_stage_has_its_layers_and_what_trains_has_the_rest() -> None:
    found = partitions(400)
    found.fit((2,), ["a", "b"])
    stages = [Stage(0, 2), Stage(1, 2)]
    assert [found.layers(stage).chunks for stage in stages] == [(("front",),), (("back",),)]
    assert {stage: pieces.names for stage, pieces in found.parts(Pieces()).items()} == {
        Stage(): (REST, "back", "front"),
        Stage(0, 2): (REST, "front"),
        Stage(1, 2): (REST, "back"),
    }
    assert found.holders([*stages, stages[0]]) == {REST: (0, 1, 2), "front": (0, 2), "back": (1,)}


def test_a_stage_has_the_rows_of_its_layers_weights() -> None:
    found = partitions(400)
    found.fit((2,), ["a", "b"])
    front, back = Piece("front.weight", 0, 4), Piece("back.0.weight", 0, 3)
    all_rows = Pieces.of([front, back])
    rows = {stage: pieces & all_rows for stage, pieces in found.parts(all_rows).items()}
    assert rows == {
        Stage(): all_rows,
        Stage(0, 2): Pieces.of([front]),
        Stage(1, 2): Pieces.of([back]),
    }
    assert found.layers(Stage()) == WHOLE
    assert found.parameters(form_view(0, ["a", "b"], Shape(1, 2), 2)) == {"a": 6, "b": 5}
    assert found.parameters(form_view(0, ["a", "b"], Shape(2), 2)) == {"a": 11, "b": 11}


def sliced(room: int, most: int, stages: int = 1) -> Partitions:
    """Of a model of four layers that is cut into two slices; a worker has so many bytes, and there are so many."""
    layers = tuple(
        Layer(name, seconds, 40, sliced_bytes=40) for name, seconds in zip("abcd", (1, 1, 1, 3), strict=True)
    )
    roster = Roster()
    roster.record_location(WorkerLocation(worker="a", pid=1, node="n", address="h"))
    roster.prepared("a", PreparedReport(parameters=11, state_bytes=1, layers=layers, room=room))
    job = job_of(1, most, parallel=Parallel(pipeline=stages, tensor=2))
    return Partitions(job, roster, SizeTable(1, most, job.data.shards, (stages,), 2))


def test_slices_are_hosted_on_fewer_workers_only_if_their_own_partition_fits() -> None:
    found = sliced(100, 4, stages=2)
    # One with less memory would be ab and cd, but the stages are abc and d.
    assert found.fit((2,), ["a"]) == ((2,), frozenset({(2, 1)}))
    assert found.layers(Stage(0, 2, 1, 2)).chunks == (("a", "b", "c"),)
    assert found.layers(Stage(0, 2, 1, 2)).others == {"d", "a@0", "b@0", "c@0", "d@0", "d@1"}
    assert sliced(200, 4, stages=2).fit((2,), ["a"]) == ((2,), frozenset())


def test_a_model_that_fits_only_on_more_workers_than_there_may_be_is_refused() -> None:
    assert sliced(100, 2).fit((1,), ["a"]) == ((1,), frozenset({(1, 1)}))
    with pytest.raises(InputError, match=r"(?s)workers.max: 1: the model does not fit.*2 or more, which share"):
        sliced(100, 1).fit((1,), ["a"])


def test_a_given_partition_is_used_at_its_number_of_stages_only() -> None:
    found = partitions(400, FOUR, ("a", "b", "d"))
    assert found.fit((3, 2, 1), ["a", "b"]) == ((3, 2, 1), frozenset())
    assert [found.layers(Stage(number, 3)).chunks for number in range(3)] == [(("a",),), (("b", "c"),), (("d",),)]
    assert [found.layers(Stage(number, 2)).chunks for number in range(2)] == [(("a", "b"),), (("c", "d"),)]
    assert [found.replaces(stages) for stages in (3, 2, 1)] == [False, True, True]
    assert not partitions(400).replaces(1)
