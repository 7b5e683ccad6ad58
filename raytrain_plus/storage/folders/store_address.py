"""Translate pyarrow's settings of an object store into the configuration of obstore. Pure.

pyarrow takes addresses apart and refuses settings that it does not know, so runs and data have the same addresses:

    s3://bucket/runs?region=eu-west-1                           bucket, key prefix `runs`
    gs://bucket/runs, gcs://bucket/runs
    abfs://container@account.dfs.core.windows.net/runs          an account at Azure; abfss:// is the same
    abfs://account@host:10000/container/runs                    another server that speaks Azure's protocol

Credentials come from the environment and never from an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STORES = ("s3", "gcs", "abfs")
"""Object stores, by pyarrow's names: a folder is a prefix of names, which cannot be renamed."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Which bucket of a store an address names, and how obstore is to be configured for it."""

    kind: str
    """One of `STORES`."""
    bucket: str
    """Name of the bucket, or of Azure's container."""
    path: str
    """What all keys begin with, without slashes at its ends; empty for the whole bucket."""
    config: dict[str, Any] = field(default_factory=dict)
    """obstore's configuration of the store."""
    http: bool = False
    """Whether the store is reached without TLS."""
    retry: dict[str, Any] = field(default_factory=dict)
    """obstore's configuration of retries."""
    ca_file: Path | None = None
    """File with the certificates that the client trusts in addition."""


def store_address(kind: str, path: str, settings: Mapping[str, Any]) -> StoreAddress:
    """Return what a path, which begins with a bucket, and the settings of a file system of pyarrow name."""
    bucket, _, prefix = path.partition("/")
    return {"s3": _s3, "gcs": _google, "abfs": _azure}[kind](bucket, prefix, settings)


def _s3(bucket: str, path: str, settings: Mapping[str, Any]) -> StoreAddress:
    endpoint = _url(settings["scheme"], settings["endpoint_override"])
    config: dict[str, Any] = {"region": settings["region"]}
    if endpoint:
        # Under both names: a variable of the environment may hold either.
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    else:
        # The certificates of AWS do not fit names of buckets with dots.
        config["virtual_hosted_style_request"] = "." not in bucket
    ca_file = settings.get("tls_ca_file_path")
    ca_path = Path(ca_file) if ca_file else None
    return StoreAddress("s3", bucket, path, config, endpoint.startswith("http://"), ca_file=ca_path)


def _google(bucket: str, path: str, settings: Mapping[str, Any]) -> StoreAddress:
    endpoint = _url(settings["scheme"], settings["endpoint_override"])
    http = endpoint.startswith("http://")
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    if settings["anonymous"] or http:
        # A server without TLS gets no credentials: it is a local one, which checks none.
        config["skip_signature"] = True
    limit = settings["retry_time_limit"]
    return StoreAddress("gcs", bucket, path, config, http, {} if limit is None else {"retry_timeout": limit})


def _azure(bucket: str, path: str, settings: Mapping[str, Any]) -> StoreAddress:
    account, authority = settings["account_name"], settings["blob_storage_authority"]
    server = f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"
    config = {"account_name": account, "endpoint": _url(settings["blob_storage_scheme"], server)}
    config |= {name: settings[name] for name in ("client_id", "tenant_id") if settings[name]}
    return StoreAddress("abfs", bucket, path, config, settings["blob_storage_scheme"] == "http")


def _url(scheme: str, server: str) -> str:
    return server if not server or "://" in server else f"{scheme}://{server}"
