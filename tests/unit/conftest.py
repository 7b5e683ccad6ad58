"""Shared by the pure tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from raytrain_plus.storage.folder import Folder, open_folder
from raytrain_plus.storage.local import LocalFolder

# A deadline on one example measures the machine: on a busy one, any can take a second.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def bucket() -> Iterator[Folder]:
    """A bucket of a local S3."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            patch.setenv(name, "true")
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        address = "http://{}:{}".format(*server.get_host_and_port())
        boto3.client("s3", endpoint_url=address, region_name="us-east-1").create_bucket(Bucket="contract")
        yield open_folder(f"s3://contract?endpoint_override={address}&region=us-east-1&scheme=http")
    server.stop()


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A run's folder, empty, of either kind: one whose files can grow, and one of whole objects."""
    if request.param == "local":
        return LocalFolder(tmp_path / "run")
    bucket: Folder = request.getfixturevalue("bucket")
    return bucket.inside(tmp_path.name).inside("run")
