"""Shared by the pure tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.local import LocalFolder
from raytrain_plus.storage.open import open_folder
from tests.unit.storage.store import at, serving

# A deadline on one example measures the machine: on a busy one, any can take a second.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def bucket() -> Iterator[Folder]:
    """A bucket of a local S3."""
    with serving("contract") as (host, port):
        yield open_folder(at("s3://contract", f"http://{host}:{port}"))


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A run's folder, empty, of either kind: one whose files can grow, and one of whole objects."""
    if request.param == "local":
        return LocalFolder(tmp_path / "run")
    bucket: Folder = request.getfixturevalue("bucket")
    return bucket.inside(tmp_path.name).inside("run")
