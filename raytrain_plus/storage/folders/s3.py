"""Add what pyarrow's S3 lacks: create an object only if it does not exist, and abort an upload.

    upload:  less than a part      put
             more                  multipart upload: begin - send parts - complete; aborted if anything fails before
    create:  put, with If-None-Match: *

An object is named by its bucket and key, as in pyarrow: `bucket/runs/a/name`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from raytrain_plus.errors import StorageError
from raytrain_plus.storage.interface import Buffer

PART = 16 << 20
"""Bytes per part of an upload; S3 takes 10,000 parts, so an object has at most 156 GiB."""
SENDERS = 4
"""Parts sent concurrently; one more is being filled."""
CONFLICTS = 10
"""Maximum attempts to create an object that others write at the same moment."""
CONFLICT_WAIT_S = 0.2


class Objects:
    """The objects that one client can reach. Raises `StorageError` if a request fails."""

    def __init__(self, settings: Mapping[str, Any], region: str) -> None:
        """Create the client; `settings` are those of a `pyarrow.fs.S3FileSystem`."""
        endpoint = settings["endpoint_override"]
        if endpoint and "://" not in endpoint:
            endpoint = f"{settings['scheme']}://{endpoint}"
        by_path = endpoint and not settings["force_virtual_addressing"]
        self._client: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint or None,
            region_name=region,
            aws_access_key_id=settings["access_key"] or None,
            aws_secret_access_key=settings["secret_key"] or None,
            aws_session_token=settings["session_token"] or None,
            verify=settings.get("tls_ca_file_path") or None,
            config=Config(
                connect_timeout=settings["connect_timeout"],
                read_timeout=settings["request_timeout"],
                retries={"mode": "standard", "total_max_attempts": 3},
                s3={"addressing_style": "path" if by_path else "auto"},
            ),
        )

    def create(self, path: str, data: bytes) -> bool:
        """Put an object that does not exist yet; return False if it exists. Conflicts with other puts are retried."""
        with _told(path, "created"):
            for _ in range(CONFLICTS):
                try:
                    self._client.put_object(**_at(path), Body=data, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    if status == 412:
                        return False
                    if status != 409:
                        raise
                time.sleep(CONFLICT_WAIT_S)
        raise StorageError(
            f"s3://{path} could not be created: {CONFLICTS} attempts conflicted with other writers of the object"
        )

    def upload(self, path: str, data: Iterable[Buffer]) -> None:
        """Write an object from its pieces, whole or not at all. The calling thread reads `data`."""
        parts = _parts(data)
        first = next(parts, bytearray())
        if len(first) < PART:
            with _told(path, "written"):
                self._client.put_object(**_at(path), Body=first)
            return
        with _told(path, "written"):
            upload = {**_at(path), "UploadId": self._client.create_multipart_upload(**_at(path))["UploadId"]}
        try:
            sent = self._send(upload, itertools.chain([first], parts))
            with _told(path, "written"):
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": sent})
        except BaseException:
            # If this fails too, the remaining parts form no object; the caller must see the first failure.
            with contextlib.suppress(ClientError, BotoCoreError):
                self._client.abort_multipart_upload(**upload)
            raise

    def _send(self, upload: Mapping[str, str], parts: Iterable[bytearray]) -> list[dict[str, Any]]:
        """Send the parts of an upload; return once all are sent."""

        def send(number: int, part: bytearray) -> dict[str, Any]:
            with _told(f"{upload['Bucket']}/{upload['Key']}", "written"):
                tag = self._client.upload_part(**upload, PartNumber=number, Body=part)["ETag"]
            return {"PartNumber": number, "ETag": tag}

        sent: list[Future[dict[str, Any]]] = []
        with ThreadPoolExecutor(SENDERS, thread_name_prefix="upload") as pool:
            for number, part in enumerate(parts, start=1):
                if number > SENDERS:
                    sent[-SENDERS].result()
                sent.append(pool.submit(send, number, part))
        return [part.result() for part in sent]

    def copy(self, path: str, to: str) -> None:
        """Copy an object of any size inside the store."""
        with _told(path, f"copied to s3://{to}"):
            self._client.copy(_at(path), **_at(to))


def _at(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _parts(data: Iterable[Buffer]) -> Iterator[bytearray]:
    """Yield the same bytes in parts of equal size, except the last."""
    part = bytearray()
    for piece in data:
        rest = memoryview(piece).cast("B")
        while rest:
            count = min(PART - len(part), len(rest))
            part += rest[:count]
            rest = rest[count:]
            if len(part) == PART:
                yield part
                part = bytearray()
    if part:
        yield part


@contextlib.contextmanager
def _told(path: str, done: str) -> Iterator[None]:
    """Turn the errors of the client into a `StorageError` that says what could not be done.

    The cause is not chained: logs would show its unmodified text, which may contain an address with credentials.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise StorageError(f"s3://{path} could not be {done}: {error}") from None
