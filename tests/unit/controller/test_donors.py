"""Members of a new generation take what they lack from those who have it, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.controller.roster.donors import DonorPart, donor_parts
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Piece, Pieces, union
from raytrain_plus.parallel.pipeline.partition import Layer, balanced_spans
from raytrain_plus.state.stages import REST

LAYERS = [f"block{number}" for number in range(12)]
BYTES = {name: 100 + number for number, name in enumerate(LAYERS)} | {REST: 0}


def pieces(stage: Stage) -> Pieces:
    """Return the layers of a stage of an even partition."""
    spans = balanced_spans([Layer(name, 1.0, 1, 1) for name in LAYERS], stage.of)
    assert spans is not None
    first, last = spans[stage.number]
    return Pieces.of(Piece(name) for name in (*LAYERS[first:last], REST))


def sources(
    takers: Mapping[str, Stage], holding: Mapping[str, Stage], providers: Sequence[tuple[str, Stage]]
) -> dict[str, tuple[DonorPart, ...]]:
    return donor_parts(
        {name: pieces(stage) for name, stage in takers.items()},
        {name: pieces(stage) for name, stage in holding.items()},
        {provider: pieces(provider[1]) for provider in providers},
        BYTES,
        Pieces(),
    )


def test_a_newcomer_takes_its_whole_stage_from_its_holder() -> None:
    given = [("a", Stage(0, 2)), ("b", Stage(1, 2))]
    assert sources({"x": Stage(1, 2)}, {}, given) == {"x": (DonorPart("b", Stage(1, 2), None),)}
    whole = [("a", Stage())]
    assert sources({"x": Stage()}, {}, whole) == {"x": (DonorPart("a", Stage(), None),)}


def test_a_member_takes_from_its_own_copy_what_it_lacks() -> None:
    """Though another worker, which gives nothing yet, has it too."""
    own, other = Stage(0, 2), Stage(1, 2)
    given = [("b", other), ("a", other), ("a", own)]
    [found] = sources({"a": Stage()}, {"a": own}, given)["a"]
    assert (found.worker, found.stage) == ("a", other)
    both = sources({"a": other, "x": other}, {}, given)
    assert both["a"] == (DonorPart("a", other, None),)
    assert {one.worker for one in both["x"]} == {"a", "b"}, "those that give share the work"


@given(
    before=st.integers(1, 6),
    after=st.integers(1, 6),
    keepers=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
)
def test_members_take_only_what_they_have_neither_held_nor_copied(
    before: int, after: int, keepers: list[tuple[int, int]]
) -> None:
    """Workers hold the stages of one partition, and keep copies of others'; all take places of another partition."""
    old = [Stage(number, before) for number in range(before)]
    copies = [(f"w{worker % before}", old[stage % before]) for worker, stage in keepers]
    providers = [*((f"w{number}", stage) for number, stage in enumerate(old)), *dict.fromkeys(copies)]
    takers = {f"w{number}": Stage(number, after) for number in range(after)}
    holding = {f"w{number}": stage for number, stage in enumerate(old) if number < after}
    for name, parts in sources(takers, holding, list(dict.fromkeys(providers))).items():
        taken = Counter(layer for part in parts for layer in part.layers or pieces(part.stage).names)
        held = pieces(holding[name]) if name in holding else Pieces()
        assert taken == Counter((pieces(takers[name]) - held).names)
        of_others = [part for part in parts if part.worker != name]
        copied = {layer for worker, stage in copies if worker == name for layer in pieces(stage).names}
        assert not any(copied & set(part.layers or pieces(part.stage).names) for part in of_others)


def test_newcomers_that_lack_the_same_share_one_part() -> None:
    found = sources({"x": Stage(), "y": Stage()}, {}, [("a", Stage())])
    assert found["x"] == found["y"]


def test_a_member_that_has_its_layers_takes_nothing() -> None:
    """With more stages than before, it holds less."""
    half, quarter = Stage(0, 2), Stage(1, 4)
    assert sources({"a": quarter}, {"a": half}, [("a", half), ("b", Stage(1, 2))]) == {"a": ()}


def test_stages_of_two_partitions_give_each_layer_once() -> None:
    """A state of which some workers hold stages of two, others of three."""
    held = [("a", Stage(0, 2)), ("b", Stage(1, 3)), ("c", Stage(2, 3))]
    taken = sources({"c": Stage(1, 2), "x": Stage(0, 2)}, {"c": Stage(2, 3)}, held)
    assert taken["c"] == (DonorPart("b", Stage(1, 3), ("block6", "block7")),)
    assert [layer for part in taken["x"] for layer in part.layers or LAYERS[:6]] == LAYERS[:6]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 2), (4, 1), (3, 2), (2, 3), (6, 4)])
def test_a_repartition_moves_exactly_the_missing_layers(before: int, after: int) -> None:
    """The last workers are lost; the first one keeps a copy of what they had."""
    old = [Stage(number, before) for number in range(before)]
    survivors = [f"w{number}" for number in range(min(before, after))]
    newcomers = [f"new{number}" for number in range(after - len(survivors))]
    providers = [(survivors[number] if number < len(survivors) else "w0", stage) for number, stage in enumerate(old)]
    takers = {name: Stage(number, after) for number, name in enumerate([*survivors, *newcomers])}
    holding = dict(zip(survivors, old, strict=False))
    moved = 0
    for name, parts in sources(takers, holding, providers).items():
        taken = Counter(layer for part in parts for layer in part.layers or pieces(part.stage).names)
        missing = pieces(takers[name]) - (pieces(holding[name]) if name in holding else Pieces())
        assert taken == Counter(missing.names)
        assert all(set(part.layers or ()) <= set(pieces(part.stage).names) for part in parts)
        moved += sum(BYTES[layer] for layer in taken)
    all_bytes, kept = sum(BYTES.values()), 0
    for name, stage in holding.items():
        kept += (pieces(stage) & pieces(takers[name])).size(BYTES)
    assert moved == all_bytes - kept


def test_rows_come_from_those_who_hold_them_and_the_rest_from_one() -> None:
    rows = {name: Pieces.of([Piece("w", *pair)]) for name, pair in {"a": (0, 4), "b": (2, 8)}.items()}
    rest, all_rows = Pieces.of([Piece(REST)]), union(rows.values())
    providers = {(name, Stage()): union([rest, own]) for name, own in rows.items()}
    wanted = Pieces.of([Piece("w", 1, 8)])
    found = donor_parts({"x": union([rest, wanted])}, {}, providers, {REST: 0, "w": 4}, all_rows)["x"]
    assert Pieces.of(piece for one in found for piece in one.rows or ()) == wanted
    assert sorted(str(one.layers) for one in found) == ["()", "None"]
    # A member that keeps its weights takes rows alone.
    held = union([rest, rows["a"]])
    [one] = donor_parts({"a": union([rest, wanted])}, {"a": held}, providers, {REST: 0, "w": 4}, all_rows)["a"]
    assert one == DonorPart("b", Stage(), (), (Piece("w", 4, 8),))
