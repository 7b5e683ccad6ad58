"""`raytrain plan`: what it is asked, what it shows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.checks.plan_report import PlanReport
from raytrain_plus.checks.planned import plan_job, read_memory, read_sizes
from raytrain_plus.cli import main as cli
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job.yaml import load_job
from raytrain_plus.planner.layer_profile import LinkSpeed
from raytrain_plus.planner.proposals import proposals
from raytrain_plus.planner.search import plan_sizes
from tests.unit.planner.profiles import MB, job, layer, model

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(("text", "sizes"), [("1..4", [1, 2, 3, 4]), ("8, 1,2", [1, 2, 8]), ("2..3,3..4", [2, 3, 4])])
def test_sizes_are_a_range_or_a_list(text: str, sizes: list[int]) -> None:
    assert read_sizes(text, job()) == sizes


@pytest.mark.parametrize("text", ["", "0..4", "4..1", "1...3", "x", "1..20000", "-1"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="gives no numbers of workers"):
        read_sizes(text, job())


def test_sizes_below_one_replica_are_refused() -> None:
    from raytrain_plus import Workers

    overlapping = job(parallel={"pipeline": 4, "schedule": "pipedream"}, workers=Workers(min=4))
    with pytest.raises(InputError, match="at most 3 workers, but a replica of this job needs 4"):
        read_sizes("1..3", overlapping)


@pytest.mark.parametrize("text", ["", "80 apples", "0G", "-1G"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no amount of memory"):
        read_memory(text)


CLUSTER = """
cluster_name: x
max_workers: 4
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, node_config: {}}
  worker: {min_workers: 1, max_workers: 4, resources: {CPU: 4%s}, node_config: {}}
"""


def test_a_cluster_file_without_memory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER % "")
    with pytest.raises(InputError, match="does not say how much memory its machines have"):
        plan_job(job(), [], [1], str(file), None)


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", *words])
    return left.value.code, *capsys.readouterr()


def test_the_command_shows_a_row_for_each_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(REPOSITORY)
    small = ["jobs/digits.yaml", "--set", f"data.path={tmp_path / 'train'}"]
    code, out, err = said(*small, "--sizes", "1..3", "--json", capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert [row["workers"] for row in found["plans"]] == [1, 2, 3]
    assert all(row["memory"]["total"] > row["memory"]["process"] > 10 * MB for row in found["plans"])
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER % ", memory: 8000000000")
    code, out, err = said(*small, "--sizes", "2,16", "--cluster", str(file), capsys=capsys)
    assert code == 0, err
    assert "machines with room for 4 workers on 4 cores, 2.0 GB each" in out
    assert "samples/s" in out
    assert "without MFU and $/epoch" in out
    code, out, err = said(*small, "--memory", "1M", "--sizes", "1..2", capsys=capsys)
    assert code == 0
    assert "2: cannot work: a worker needs" in out
    code, out, err = said(*small, "--sizes", "none", capsys=capsys)
    assert (code, "gives no numbers of workers" in err) == (2, True)


def test_a_task_that_cannot_be_profiled_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    wanted, roots = load_job("jobs/digits.yaml", [f"data.path={tmp_path / 'train'}", "args={width: -1}"])
    with pytest.raises(TaskError):
        plan_job(wanted, roots, [1], None, None)


def test_reasons_are_told_where_a_choice_changes() -> None:
    profile = model([layer(f"l{number}", 1e-3, 1000, 1e4) for number in range(4)])
    table = plan_sizes(job(), profile, range(1, 15), lambda workers: 1e9)
    lines = PlanReport("x", job(), table, profile, ("one more",), "here").lines()
    assert sum("data.shards = 12 gives no more replicas work" in line for line in lines) == 1
    assert any(line.startswith("  1: the simplest settings fit") for line in lines)
    assert lines[-1] == "  would change the result: one more"


def test_more_shards_are_proposed_where_workers_have_none() -> None:
    profile = model([layer("l", 1e-2, 1000)], layered=False)
    few = job(48, 2)
    [found] = [one for one in proposals(few, profile, 4, lambda workers: 1e9) if "shards" in one]
    assert found == "data.shards: 4 would make steps of 4 workers 2.0 times as fast"


def test_nothing_is_proposed_that_gains_nothing() -> None:
    profile = model([layer("l", 1e-2, 1000)], layered=False, link=LinkSpeed(0.0, 1e30))
    assert list(proposals(job(48, 4), profile, 4, lambda workers: 1e9)) == []
