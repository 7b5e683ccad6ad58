"""Shared by the pure tests."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from tests.unit.storage.store import address_of, serving_kind

# A deadline on one example measures the machine: on a busy one, any can take a second.
settings.register_profile("few", deadline=None, max_examples=25)
# `make test-slow` runs the same tests with `--hypothesis-profile=many`.
settings.register_profile("many", deadline=None, max_examples=500)
settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude all that is imported from garbage collection, which would search torch and Ray for it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep converted data, which is kept in the user's home, out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def bucket_of() -> Iterator[Callable[[str], Folder]]:
    """Return the bucket of a local server, given one of `KINDS`; each server is started when it is first wanted."""
    with contextlib.ExitStack() as servers:

        @functools.cache
        def started(kind: str) -> Folder:
            host, port = servers.enter_context(serving_kind(kind, "contract"))
            return open_folder(address_of(kind, "contract", host, port))

        yield started


@pytest.fixture(scope="session")
def bucket(bucket_of: Callable[[str], Folder]) -> Folder:
    """A bucket of a local S3."""
    return bucket_of("s3")


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A run's folder, empty, of either kind: one whose files can grow, and one of whole objects."""
    if request.param == "local":
        return LocalFolder(tmp_path / "run")
    bucket_of: Callable[[str], Folder] = request.getfixturevalue("bucket_of")
    return bucket_of(request.param).inside(tmp_path.name).inside("run")
