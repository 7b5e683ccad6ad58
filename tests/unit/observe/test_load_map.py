"""The map of loads of experts is well-formed SVG of bounded size, and shows the worst layers."""

import doctest
import re
from xml.etree import ElementTree

from raytrain_plus.observe.views import load_map as module
from raytrain_plus.observe.views.load_map import LoadMap
from raytrain_plus.observe.views.page import Page
from tests.unit.observe.feed import Event, event, experts, step

SVG = "{http://www.w3.org/2000/svg}"


def fed(*events: Event, total: int = 100) -> LoadMap:
    loads = LoadMap(total)
    for one in events:
        loads.add(one)
    return loads


def texts(loads: LoadMap) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(loads.svg()).iter(f"{SVG}text")]


def cells(loads: LoadMap) -> list[tuple[str, str, list[tuple[float, ...]]]]:
    """Return each shade's colour, opacity, and rectangles: left, top, width, height."""
    return [
        (
            path.get("fill") or "",
            path.get("fill-opacity") or "",
            [tuple(map(float, one)) for one in re.findall(r"M([\d.]+) (\d+)h([\d.]+)v(\d+)h", path.get("d") or "")],
        )
        for path in ElementTree.fromstring(loads.svg()).iter(f"{SVG}path")
    ]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_run_without_experts_has_none() -> None:
    assert fed(step(0)).svg() == ""
    page = Page("gpt", 10)
    page.add(step(0))
    assert page.html().count("<svg") == 1
    page.add(experts(0, block0=[1, 1]))
    assert page.html().count("<svg") == 2


def test_a_shade_is_for_how_far_a_load_is_from_the_even_one() -> None:
    # 564 pixels for 4 steps.
    loads = fed(*(one for n in range(2) for one in (step(n), experts(n, a=[8, 0, 4, 4]))), step(2), total=4)
    assert cells(loads) == [
        ("#4c8dca", "1", [(52.0, 54.0, 423.0, 8.0)]),
        ("#e45756", "0.5", [(52.0, 46.0, 423.0, 8.0)]),
    ]
    assert texts(loads)[1:] == ["a: MaxVio 1.00"]
    # Steps that are void are drawn no more: the newest loads stand for those after them.
    loads.add(experts(2, a=[0, 8, 4, 4]))
    assert len(cells(loads)[0][2]) == 2
    for one in (event("resumed", step=1, checkpoint=None, voided_to=2), step(2)):
        loads.add(one)
    assert [[wide for _, _, wide, _ in found] for _, _, found in cells(loads)] == [[423.0], [423.0]]


def test_the_worst_layers_are_drawn_in_the_order_of_the_model() -> None:
    layers = {f"block{number}": [30 + number * (number != 5), 30, *[30] * 30] for number in range(6)}
    found = texts(fed(step(0), experts(0, **layers)))
    assert [text.partition(":")[0] for text in found[1:]] == ["block3", "block4", "4 more layers with a smaller MaxVio"]


def test_the_map_stays_small() -> None:
    loads = fed(total=5000)
    for number in range(5000):
        loads.add(step(number))
        loads.add(experts(number, a=[(number * 7 + expert * 13) % 11 for expert in range(256)], b=[1, 1]))
    assert len(loads.svg()) < 400_000
    assert texts(loads)[1:] == ["a: MaxVio 1.00", "1 more layer with a smaller MaxVio"]
