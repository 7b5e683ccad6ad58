"""pyarrow's addresses and settings name the same store to obstore; every other setting is refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.folders.store_address import StoreAddress, store_address
from raytrain_plus.storage.pyarrow_system import open_system, system_settings

AZURE = {"account_name": "me", "endpoint": "https://me.blob.core.windows.net"}
LOCAL = {"account_name": "me", "endpoint": "http://127.0.0.1:10000/me"}
MINIO = {"region": "x", "endpoint": "http://localhost:9000", "aws_endpoint_url_s3": "http://localhost:9000"}
AWS = {"region": "x", "virtual_hosted_style_request": True}
PLAIN = {"skip_signature": True, "base_url": "http://localhost:4443"}


def named(address: str) -> StoreAddress:
    system, path = open_system(address)
    return store_address(system.type_name, path.rstrip("/"), system_settings(system))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://b?region=x", StoreAddress("s3", "b", "", AWS)),
        ("s3://b/?region=x", StoreAddress("s3", "b", "", AWS)),
        ("s3://b/a%20b/c%25?region=x", StoreAddress("s3", "b", "a b/c%", AWS)),
        ("s3://b.c/runs?region=x", StoreAddress("s3", "b.c", "runs", {**AWS, "virtual_hosted_style_request": False})),
        (
            "s3://b/runs?endpoint_override=localhost:9000&scheme=http&region=x",
            StoreAddress("s3", "b", "runs", MINIO, True),
        ),
        (
            "s3://b/runs?endpoint_override=http%3A%2F%2Flocalhost:9000&region=x",
            StoreAddress("s3", "b", "runs", MINIO, True),
        ),
        (
            "s3://b/runs?region=x&tls_ca_file_path=/etc/ca.pem&allow_bucket_creation=true",
            StoreAddress("s3", "b", "runs", AWS, ca_file=Path("/etc/ca.pem")),
        ),
        ("gs://b/runs", StoreAddress("gcs", "b", "runs")),
        ("gcs://b/runs?project_id=p", StoreAddress("gcs", "b", "runs")),
        (
            "gs://anonymous@b/runs?retry_limit_seconds=1.5",
            StoreAddress(
                "gcs", "b", "runs", {"skip_signature": True}, False, {"retry_timeout": timedelta(seconds=1.5)}
            ),
        ),
        ("gs://b/runs?endpoint_override=localhost:4443&scheme=http", StoreAddress("gcs", "b", "runs", PLAIN, True)),
        ("abfs://box@me.dfs.core.windows.net/runs/a", StoreAddress("abfs", "box", "runs/a", AZURE)),
        ("abfss://box@me.dfs.core.windows.net", StoreAddress("abfs", "box", "", AZURE)),
        ("abfs://me.blob.core.windows.net/box/runs", StoreAddress("abfs", "box", "runs", AZURE)),
        ("abfs://me@127.0.0.1:10000/box/runs?enable_tls=false", StoreAddress("abfs", "box", "runs", LOCAL, True)),
        (
            "abfs://box@me.dfs.core.windows.net/runs?blob_storage_authority=.blob.core.chinacloudapi.cn",
            StoreAddress("abfs", "box", "runs", {**AZURE, "endpoint": "https://me.blob.core.chinacloudapi.cn"}),
        ),
        (
            "abfs://box@me.dfs.core.windows.net/runs?client_id=c&background_writes=true",
            StoreAddress("abfs", "box", "runs", {**AZURE, "client_id": "c"}),
        ),
    ],
)
def test_what_an_address_names(address: str, expected: StoreAddress) -> None:
    assert named(address) == expected


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_the_environment_may_name_the_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://localhost:9000")
    assert named("s3://b/runs?region=x") == StoreAddress("s3", "b", "runs", MINIO, True)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("s3:///runs", "Missing bucket name"),
        ("s3://bucket/runs?regio=x", "Unexpected query parameter in S3 URI: 'regio'"),
        ("s3://bucket/ru ns?region=x", "Cannot parse URI"),
        ("s3://bucket/a//b?region=x", "an empty part"),
        ("s3://bucket/a/../b?region=x", "an empty part, '.' or '..'"),
        ("s3://", "its path is empty"),
        ("gs:///runs", "Missing bucket name"),
        ("gs://bucket/runs?region=x", "Unexpected query parameter"),
        ("abfs://box/runs", "doesn't contain a valid account name"),
        ("abfs://box@me.dfs.core.windows.net/runs?keey=secret", "Unexpected query parameter"),
    ],
)
def test_an_invalid_address_is_an_input_error(where: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        open_folder(where)
    assert caught.value.where == where.partition("?")[0]
    assert "secret" not in str(caught.value)
    assert why in caught.value.what
    assert "\n" not in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    "where",
    [
        "s3://KEYID:pa55word@bucket/runs",
        "s3://KEYID:pa55word@bucket/ru ns",
        "s3://KEYID:pa55word/more@bucket/runs",
        "s3://KEYID:pa55word?more@bucket/runs",
        "s3://KEYID:pa55word@bucket/runs?no=such",
        "nothing://KEYID:pa55word@bucket/runs",
        "s3://bucket/runs?secret_key=pa55word",
        "abfs://box@me.dfs.core.windows.net/runs?client_secret=pa55word",
    ],
)
def test_an_address_with_a_credential_is_refused(where: str) -> None:
    """In the past its user name and password were used and only hidden from messages, and its parameters were not."""
    with pytest.raises(InputError, match="the address contains a credential: ") as caught:
        open_folder(where)
    for text in (str(caught.value), repr(caught.value)):
        assert "pa55" not in text
        assert "KEYID" not in text


@pytest.mark.parametrize("where", ["s3://bucket/runs?region=x", "gs://anonymous@bucket/runs?retry_limit_seconds=1"])
def test_an_address_is_shown_without_settings(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    folder = open_folder(where)
    assert (folder.where, folder.address, folder.exclusive) == (where.partition("?")[0], where, True)
