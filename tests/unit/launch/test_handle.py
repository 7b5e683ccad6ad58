"""The handle of a run: its picture in a notebook, and an interrupt while waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from raytrain_plus import Data, Job, attach
from raytrain_plus.launch import handle
from raytrain_plus.launch.handle import FollowInterrupted, Handle
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.result import Result
from raytrain_plus.storage.folders.local import LocalFolder


@pytest.fixture
def run(tmp_path: Path) -> LocalFolder:
    """A run that has made two of four steps, and whose controller is gone."""
    run = LocalFolder(tmp_path / "gpt")
    run.write("job.yaml", [Job(name="gpt", task="a:B", data=Data(path="d", batch_size=8), steps=4).to_yaml().encode()])
    log = EventLog(run, clock=lambda: 0.0)
    for step in range(2):
        fields = {"step": step, "epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": 0.3, "seconds": 0.1}
        log.write("step_committed", generation=0, fields=fields)
    log.close()
    return run


def test_a_notebook_draws_a_handle(run: LocalFolder) -> None:
    shown = attach(str(run.path))
    page = ElementTree.fromstring(shown._repr_html_())
    texts = [text.text for text in page.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["gpt", "step 2 of 4, 50 %"]
    assert (page.findtext("pre") or "").startswith("gpt: 4 steps\nstep 2/4  loss 0.5000")
    assert repr(shown) == "<run gpt: unfinished>"
    Result(name="gpt", status="finished", exit_code=0, path=run.path, steps=4, samples=32).save(run)
    assert "gpt finished: 4 steps" in shown._repr_html_()
    assert repr(shown) == "<run gpt: finished>"


@pytest.mark.parametrize("wait", [Handle.follow, Handle.result])
def test_an_interrupt_ends_only_the_waiting(
    run: LocalFolder, wait: Callable[[Handle], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "watch", interrupted)
    with pytest.raises(FollowInterrupted, match="gpt continues in the background") as caught:
        wait(attach(str(run.path)))
    assert caught.value._render_traceback_() == [str(caught.value)]


def test_the_handle_of_a_run_that_had_finished_before_has_its_result(
    run: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Result(name="gpt", status="finished", exit_code=0, path=run.path, steps=4, samples=32, trained_steps=0)
    shown = Handle(run, ended)
    assert shown.result() is shown.follow() is ended
    assert "gpt was already finished" in capsys.readouterr().out
