"""The cost of a loss, computed from the times of its events."""

from __future__ import annotations

import pytest

from raytrain_plus.controller.record.sums.incidents import Incidents

A, B, C = ({"worker": name} for name in "abc")


def test_a_loss_is_reported_phase_by_phase() -> None:
    incidents = Incidents()
    incidents.joined(0.5, {"a": A, "b": B}, form_s=0.1)
    assert incidents.committed(1.0) is None
    incidents.broke(1.2, "")
    incidents.broke(1.25, "b was killed")
    incidents.left(1.3, 1)
    incidents.joined(1.6, {"a": A, "c": C}, form_s=0.2)
    recovery = incidents.committed(2.0)
    assert recovery is not None
    assert recovery.cause == "b was killed"
    assert recovery.stall_s == 1.0
    assert recovery.phases == pytest.approx(
        {"detect": 0.2, "interrupt": 0.1, "form": 0.2, "transfer": 0.1, "resume": 0.4}
    )
    assert sum(recovery.phases.values()) == pytest.approx(recovery.stall_s)
    assert (recovery.kept, recovery.replaced, recovery.steps_recomputed) == ([A], [C], 1)
    assert incidents.committed(2.1) is None


def test_to_wait_for_workers_is_a_phase_of_its_own() -> None:
    incidents = Incidents()
    incidents.joined(0.5, {"a": A, "b": B}, form_s=0.1)
    incidents.waits(0.7)
    incidents.committed(1.0)
    incidents.broke(1.2, "b was killed")
    incidents.waits(1.3)
    incidents.waits(1.8)
    incidents.left(5.3, 0)
    incidents.joined(5.6, {"a": A, "c": C}, form_s=0.2)
    recovery = incidents.committed(6.0)
    assert recovery is not None
    assert recovery.phases == pytest.approx(
        {"detect": 0.2, "interrupt": 0.1, "wait": 4.0, "form": 0.2, "transfer": 0.1, "resume": 0.4}
    )
    assert sum(recovery.phases.values()) == pytest.approx(recovery.stall_s)


def test_a_loss_during_a_recovery_belongs_to_it() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A, "b": B, "c": C}, form_s=0.1)
    incidents.committed(1.0)
    incidents.broke(1.1, "b was killed")
    incidents.left(1.2, 0)
    incidents.broke(1.3, "c was killed")
    incidents.left(1.4, 2)
    incidents.joined(1.5, {"a": A}, form_s=0.1)
    recovery = incidents.committed(1.7)
    assert recovery is not None
    assert recovery.cause == "b was killed; c was killed"
    assert (recovery.stall_s, recovery.steps_recomputed) == (pytest.approx(0.7), 2)
    assert recovery.kept == [A]


def test_what_members_saw_is_the_cause_only_if_nobody_was_lost() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A, "b": B}, form_s=0.1)
    incidents.committed(1.0)
    incidents.broke(1.1, "a: cannot start", follows=True)
    incidents.broke(1.2, "b: connection closed", follows=True)
    assert incidents.last_world == "a: cannot start"
    incidents.joined(1.3, {"a": A, "b": B}, form_s=0.1)
    assert incidents.last_world == ""
    incidents.broke(1.4, "a: connection closed", follows=True)
    assert incidents.last_world == "a: connection closed"
    incidents.joined(1.5, {"a": A, "b": B}, form_s=0.1)
    recovery = incidents.committed(1.7)
    assert recovery is not None
    assert recovery.cause == "a: cannot start"
    incidents.broke(1.8, "a: connection closed", follows=True)
    incidents.broke(1.9, "b was killed")
    assert incidents.last_world == "b was killed"


def test_late_reports_of_commits_before_the_loss_do_not_end_it() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A, "b": B}, form_s=0.1)
    incidents.committed(1.0)
    incidents.broke(1.3, "b was killed")
    assert incidents.committed(1.2) is None
    incidents.left(1.4, 0)
    incidents.joined(1.5, {"a": A}, form_s=0.1)
    recovery = incidents.committed(1.6)
    assert recovery is not None
    assert recovery.stall_s == pytest.approx(0.4)
    assert recovery.phases["detect"] == pytest.approx(0.1)


def test_a_loss_before_any_commit_begins_when_it_is_known() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A}, form_s=0.1)
    incidents.broke(2.0, "")
    incidents.left(2.1, 0)
    incidents.joined(2.2, {"a": A}, form_s=5.0)
    recovery = incidents.committed(2.5)
    assert recovery is not None
    assert (recovery.cause, recovery.stall_s) == ("a collective broke", 0.5)
    # No longer than there was time for it.
    assert recovery.phases["form"] == pytest.approx(0.1)


def test_a_loss_after_the_last_step_ends_with_the_run() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A, "b": B}, form_s=0.1)
    incidents.committed(1.0)
    assert incidents.ended(1.1) is None
    incidents.broke(1.3, "b was killed")
    incidents.record_lost("b")
    recovery = incidents.ended(1.6)
    assert recovery is not None
    assert (recovery.kept, recovery.replaced) == ([A], [])
    assert recovery.phases == pytest.approx({"detect": 0.3, "interrupt": 0, "form": 0, "transfer": 0, "resume": 0.3})
    assert incidents.ended(1.7) is None


def test_a_loss_in_the_last_evaluation_which_others_repeated() -> None:
    incidents = Incidents()
    incidents.joined(0.0, {"a": A, "b": B}, form_s=0.1)
    incidents.committed(1.0)
    incidents.broke(1.3, "b was killed")
    incidents.record_lost("b")
    incidents.left(1.4, 0)
    incidents.joined(1.6, {"a": A, "c": C}, form_s=0.1)
    recovery = incidents.ended(2.0)
    assert recovery is not None
    assert (recovery.kept, recovery.replaced, recovery.stall_s) == ([A], [C], 1.0)
