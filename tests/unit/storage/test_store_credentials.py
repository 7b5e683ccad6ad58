"""Credentials come from where users of each cloud keep them."""

from __future__ import annotations

import doctest
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError, StorageError
from raytrain_plus.storage.folders import store_client
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.folders.store_credentials import VALID, aws_credentials, is_logged_in_to_azure
from tests.unit.storage.store import address_of, serving_kind


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, and an environment without credentials."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def profile(home: Path) -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id=one\naws_secret_access_key=1\n"
        "[other]\naws_access_key_id=two\naws_secret_access_key=2\naws_session_token=t\n"
    )


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(store_client).failed == 0


def test_profiles_are_read_with_boto3(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    profile(home)
    find = aws_credentials({})
    assert find is not None
    found = find()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("one", "1", None)
    assert timedelta(0) < found["expires_at"] - datetime.now(timezone.utc) <= VALID
    monkeypatch.setenv("AWS_PROFILE", "other")
    find = aws_credentials({})
    assert find is not None
    assert (find()["access_key_id"], find()["token"]) == ("two", "t")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(InputError, match="missing"):
        aws_credentials({})


def test_no_credentials_at_all_are_one_sentence(home: Path) -> None:
    pytest.importorskip("boto3")
    folder = open_folder("s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http")
    with pytest.raises(StorageError, match=r"file could not be read: boto3 finds no AWS credentials"):
        folder.read("file")


def test_profiles_without_boto3_are_refused_with_a_remedy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    environment = {"HOME": str(home)}
    assert aws_credentials(environment) is None
    profile(home)
    with pytest.raises(InputError, match="need boto3"):
        aws_credentials(environment)
    assert aws_credentials({**environment, "AWS_ACCESS_KEY_ID": "a"}) is None


def test_without_boto3_the_environment_suffices(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_kind("s3", "runs") as (host, port):
        monkeypatch.setitem(sys.modules, "boto3", None)
        folder = open_folder(address_of("s3", "runs/a", host, port))
        assert folder.exclusive
        assert folder.create("claim", b"mine")
        assert not folder.create("claim", b"yours")


def test_azures_command_line_is_asked_if_nothing_else_is_set(home: Path) -> None:
    environment = {"HOME": str(home)}
    assert not is_logged_in_to_azure(environment)
    (home / ".azure").mkdir()
    (home / ".azure" / "azureProfile.json").write_text("{}")
    assert is_logged_in_to_azure(environment)
    assert is_logged_in_to_azure({"AZURE_CONFIG_DIR": str(home / ".azure")})
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"):
        assert not is_logged_in_to_azure({**environment, name: "x"})


@pytest.mark.parametrize("own", [True, False], ids=["google-auth", "obstore"])
def test_damaged_files_of_google_are_one_sentence(home: Path, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not own:
        monkeypatch.setitem(sys.modules, "google.auth", None)
    (home / "key.json").write_text(json.dumps({"type": "service_account", "private_key": "pa55word"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(home / "key.json"))
    with pytest.raises(StorageError, match=r"bucket.* could not be ") as caught:
        open_folder("gs://bucket/runs").read("x")
    assert "\n" not in str(caught.value)
    assert "pa55" not in str(caught.value)


def test_federated_identities_are_left_to_googles_own_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.auth")
    described = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": str(home / "token")},
    }
    (home / "key.json").write_text(json.dumps(described))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(home / "key.json"))
    folder = open_folder("gs://bucket/runs")
    assert folder.exclusive
    with pytest.raises(StorageError, match=r"could not be read: .*token' was not found"):
        folder.read("file")
