"""The diagram of a step is well-formed SVG: a row for each stage, a box for each pass; and its trace."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

from raytrain_plus.observe.views.picture import svg, trace
from raytrain_plus.parallel.pipeline.timeline import Bar, Cost, one_forward_one_backward, simulate

SVG = "{http://www.w3.org/2000/svg}"


def drawing() -> dict[tuple[int, int], list[Bar]]:
    bars = simulate(one_forward_one_backward(2, 4), [Cost(0.02, 0.02, 0.02)] * 2)
    return {(replica, stage): [bar for bar in bars if bar.stage == stage] for replica in range(2) for stage in range(2)}


def test_every_pass_has_its_box() -> None:
    root = ElementTree.fromstring(svg(drawing(), "step 4 <1>"))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) == 2 * 2 * 8
    assert titles.count("forward of microbatch 0, chunk 0: 20.00 ms") == 2
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"step 4 <1>", "replica 1, stage 0", "forward", "backward"} <= set(texts)
    assert "backward, for the weights" not in texts
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    width = float(root.get("width") or 0)
    assert all(float(box.get("x") or 0) + float(box.get("width") or 0) <= width for box in boxes)
    # The boxes of a row do not overlap.
    for row in {box.get("y") for box in boxes}:
        spans = sorted(
            (float(box.get("x") or 0), float(box.get("x") or 0) + float(box.get("width") or 0))
            for box in boxes
            if box.get("y") == row
        )
        assert all(end <= start + 0.02 for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_trace_has_a_process_per_replica_and_a_thread_per_stage() -> None:
    events = json.loads(json.dumps(trace(drawing())))["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 2 * 2 * 8
    assert {(event["pid"], event["tid"]) for event in passes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {event["dur"] for event in passes if event["cat"] == "forward"} == {20_000.0}
