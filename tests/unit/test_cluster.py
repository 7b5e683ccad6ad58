"""What is said of a cluster that cannot be joined."""

from __future__ import annotations

import socket
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from raytrain_plus import InputError
from raytrain_plus.cluster import joined

MISMATCH = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.10.1\nThis process: ..."


def test_another_ray_or_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError(MISMATCH)

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(InputError, match=r"started with: Ray: 2\.59\.0 Python: 3\.10\.1") as told,
            joined(address, token=False),
        ):
            pass
    assert address in str(told.value)


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_addresses_for_who_is_no_machine_of_the_cluster(address: str) -> None:
    with pytest.raises(InputError, match="by ray job submit"), joined(address, token=False):
        pass
