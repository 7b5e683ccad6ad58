"""Read the Grafana dashboard and the metrics that its queries use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[3] / "clusters" / "grafana" / "raytrain_plus.json"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def queries() -> Iterator[tuple[str, set[str], set[str]]]:
    """Return for each query of a panel or a variable: its text, its metrics, and the labels that it needs."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            labels = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expr))
            labels |= {name.strip() for group in re.findall(r"\bby\s*\(([^)]*)\)", expr) for name in group.split(",")}
            labels |= set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
            yield expr, set(re.findall(r"\bray_\w+", expr)), labels
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert found is not None, variable["definition"]
            yield variable["definition"], {found[1]}, {found[2]}
