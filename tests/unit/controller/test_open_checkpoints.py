"""A checkpoint is complete only with every writer's share, for committed steps, and once."""

from __future__ import annotations

from raytrain_plus.controller.checkpoints.open_checkpoints import Abandoned, Saving
from raytrain_plus.state.stored.manifest import File, Share
from raytrain_plus.workers.messages import Written

NAMES = ["a", "b", "c"]


def written(step: int, writer: int, generation: int = 0, error: str = "") -> Written:
    share = None if error else Share(File(f"{writer}", 1, "", 0, ""), {})
    return Written(
        step=step,
        generation=generation,
        writer=writer,
        writers=3,
        share=share,
        tree={} if writer == 0 else None,
        metrics={},
        time=0.0,
        stall_s=0.0,
        error=error,
    )


def test_a_checkpoint_is_whole_with_all_shares_of_a_committed_step() -> None:
    saving = Saving()
    saving.begin(4, 0, NAMES)
    for writer in (2, 0):
        assert saving.written(written(4, writer), NAMES) == []
        assert saving.whole(9) == []
    saving.written(written(4, 1), NAMES)
    assert saving.whole(3) == []
    assert saving
    [shares] = saving.whole(4)
    assert [told.writer for told in shares] == [0, 1, 2]
    assert saving.whole(9) == []
    assert not saving


def test_a_checkpoint_whose_writer_is_lost_is_given_up_once() -> None:
    saving = Saving()
    saving.begin(4, 0, NAMES)
    saving.written(written(4, 1), NAMES)
    # It has written its share.
    assert saving.lost(["a", "c"]) == []
    assert saving.lost(["a"]) == [Abandoned(4, 0, "c was lost before it had written its share")]
    assert saving.written(written(4, 0), ["a"]) == []
    saving.begin(4, 0, NAMES)
    assert not saving
    assert saving.whole(9) == []


def test_a_writer_lost_before_anybody_had_written_is_noticed() -> None:
    saving = Saving()
    saving.begin(4, 0, NAMES)
    assert saving.written(written(4, 0), ["a", "b"]) == [Abandoned(4, 0, "c was lost before it had written its share")]


def test_a_share_that_cannot_be_written_gives_the_checkpoint_up() -> None:
    saving = Saving()
    saving.begin(4, 0, NAMES)
    [given_up] = saving.written(written(4, 1, error="OSError: No space left on device"), NAMES)
    assert given_up == Abandoned(4, 0, "b could not write its share: OSError: No space left on device")


def test_checkpoints_of_several_steps_do_not_mix() -> None:
    saving = Saving()
    for step, generation in ((4, 0), (8, 0), (4, 1)):
        saving.begin(step, generation, NAMES[:2])
    for writer in (0, 1):
        saving.written(written(8, writer), NAMES)
        saving.written(written(4, writer, generation=1), NAMES)
    assert [(shares[0].step, shares[0].generation) for shares in saving.whole(9)] == [(4, 1), (8, 0)]
    assert saving.give_up_all("the run ends") == [Abandoned(4, 0, "the run ends")]


def test_checkpoints_made_void_by_a_resumption_are_given_up() -> None:
    saving = Saving()
    for step, generation in ((4, 0), (8, 0), (8, 2)):
        saving.begin(step, generation, NAMES[:1])
        saving.written(written(step, 0, generation), NAMES)
    assert [one.step for one in saving.give_up_void([(1, 4)])] == [8]
    assert [(shares[0].step, shares[0].generation) for shares in saving.whole(9)] == [(4, 0), (8, 2)]


def test_a_checkpoint_is_given_up_when_a_writer_left_without_a_copy() -> None:
    saving = Saving()
    saving.begin(4, 0, NAMES)
    saving.written(written(4, 1), NAMES)
    # It writes what it copied before it left.
    assert saving.left("a", 0, 4) == []
    assert saving.left("c", 1, -1) == [], "of another generation"
    assert saving.left("c", 0, 3) == [Abandoned(4, 0, "c left the group before it had copied its share")]
    assert not saving


def test_a_checkpoint_begun_after_a_writer_left_without_a_copy_is_given_up() -> None:
    saving = Saving()
    saving.left("c", 0, 3)
    saving.begin(4, 0, NAMES)
    assert saving.written(written(4, 0), NAMES) == [
        Abandoned(4, 0, "c left the group before it had copied its share"),
    ]
