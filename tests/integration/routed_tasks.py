"""A task with experts whose use is reported."""

from __future__ import annotations

from typing import Any

from raytrain_plus.layers import Experts
from tests.integration.tasks import Faulty


class Routed(Faulty):
    """Two layers of experts, of which the last drops most of its tokens."""

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        sparse = {
            "front": lambda: Experts(16, 32, 4, top_k=2),
            "back": lambda: Experts(16, 32, 4, top_k=1, capacity=0.1),
        }
        return {"first": parts["first"], **sparse, "last": parts["last"]}
