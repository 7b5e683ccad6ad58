"""The metrics that Ray's node exports of a run: all that the dashboard uses, with the right values."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from raytrain_plus import Checkpoint, Parallel, Workers, attach
from raytrain_plus.observe.gauges import OF_GPU, OF_WORKER
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data
from tests.unit.observe.dashboard import queries

pytestmark = pytest.mark.timeout(240)

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Return metric -> labels and value of each series."""


def until(holds: Callable[[], Any], missing: Callable[[], object], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, missing()
        time.sleep(0.2)
    return found


class Exporter:
    """Start a Ray that exports its processes' metrics once a second, and drops them after another second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The exporting process does not receive the settings of `ray.init`.
        monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _metrics_export_port=self._port,
        )

    def scrape(self) -> Samples:
        """Return the runs' currently exported metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_raytrain_"):
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found


@pytest.mark.slow
def test_a_run_exports_all_that_the_dashboard_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "data")
    try:
        exporter = Exporter(monkeypatch)
        run = Run(
            job(
                tmp_path,
                steps=100_000,
                workers=Workers(min=1, max=2),
                checkpoint=Checkpoint(every_steps=20),
                args={"pad_s": 0.005},
            )
        )
        killed, stays = run.until_size(2)
        run.until_step(20)
        run.kill(killed)
        recovered = run.until_told("recovered")
        members = {member["worker"] for member in run.until_size(2)}
        assert stays["worker"] in members
        assert killed["worker"] not in members
        before, wanted = run.committed(), {metric for _, metrics, _ in queries() for metric in metrics}
        # Nothing here has a GPU.
        wanted -= {f"ray_{name}" for name in OF_GPU}

        def steps(seen: Samples) -> float:
            return max((value for _, value in seen.get("ray_raytrain_steps", [])), default=0)

        def complete() -> Samples | None:
            seen = exporter.scrape()
            shown = {labels["worker"] for labels, _ in seen.get("ray_raytrain_step_seconds", [])}
            return seen if wanted <= seen.keys() and shown == members and steps(seen) > before + 50 else None

        seen = until(complete, lambda: f"not exported: {wanted - exporter.scrape().keys()} of {exporter.scrape()}")
        after = run.committed()

        for text, metrics, labels in queries():
            for metric in metrics & wanted:
                assert all(labels <= series.keys() for series, _ in seen[metric]), f"{text}: {seen[metric]}"
        assert {series["run"] for found in seen.values() for series, _ in found} == {"run"}

        def of_run(name: str) -> float:
            [(_, value)] = seen[f"ray_raytrain_{name}"]
            return value

        def of_workers(name: str) -> dict[str, float]:
            found = seen[f"ray_raytrain_{name}"]
            assert {series["stage"] for series, _ in found} == {"0"}
            return {series["worker"]: value for series, value in found}

        assert before + 50 < of_run("steps") <= after + 1
        assert of_run("loss") in run.losses()
        assert of_run("workers") == 2
        assert of_run("generation") == run.events()[-1]["generation"] >= 2
        assert (of_run("recoveries"), of_run("waiting")) == (1, 0)
        assert of_run("stall_seconds") == pytest.approx(recovered["stall_s"])
        assert 0 < of_run("goodput") < 1
        assert of_run("samples_per_second") > 0
        newest = of_run("checkpoint_timestamp_seconds")

        def told() -> bool:
            saved = run.events("checkpoint_saved")
            return any(abs(event["time"] - event["seconds"] - newest) < 0.1 for event in saved)

        run.until(told, f"a checkpoint of {newest}", timeout_s=10)
        for worker, in_steps in of_workers("step_seconds").items():
            waits = of_workers("data_wait_seconds")[worker], of_workers("reduce_seconds")[worker]
            assert 0 < sum(waits) < in_steps
            assert min(waits) > 0

        attach(run.folder).stop()
        assert run.finish().status == "stopped"
        until(lambda: not exporter.scrape(), lambda: f"still exported: {exporter.scrape()}")
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_each_worker_of_a_pipeline_is_exported_with_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "data")
    parallel = Parallel(pipeline=2, microbatches=3)
    try:
        exporter = Exporter(monkeypatch)
        run = Run(job(tmp_path, steps=100_000, workers=Workers(min=4), parallel=parallel))
        stages = {member["worker"]: str(member["stage"]) for member in run.until_size(4)}
        assert sorted(stages.values()) == ["0", "0", "1", "1"]
        run.until_step(10)

        def seen() -> dict[str, list[tuple[str, str]]]:
            shown = exporter.scrape()
            return {
                name: sorted((labels["worker"], labels["stage"]) for labels, _ in shown.get(f"ray_{name}", []))
                for name in OF_WORKER
            }

        expected = {name: sorted(stages.items()) for name in OF_WORKER}
        until(lambda: seen() == expected, lambda: f"{expected}, not {seen()}")
        attach(run.folder).stop()
        assert run.finish().status == "stopped"
    finally:
        ray.shutdown()
