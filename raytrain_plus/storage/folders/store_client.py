"""Open an object store with obstore: its credentials, time limits and retries, and what its errors mean.

obstore has one pool of threads in a process, which a fork does not copy: a forked child would wait for it for ever.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from obstore import store as stores
from obstore.exceptions import GenericError

from raytrain_plus.errors import StorageError
from raytrain_plus.storage.folders.store_address import StoreAddress
from raytrain_plus.storage.folders.store_credentials import (
    Provider,
    aws_credentials,
    google_credentials,
    is_logged_in_to_azure,
    no_credentials,
)
from raytrain_plus.storage.limits import ATTEMPTS, CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S

SENDERS = 4
"""Parts of an upload that are sent concurrently; one more is being filled."""
PART_TIMEOUT_S = SENDERS * REQUEST_TIMEOUT_S
"""Seconds for one part of an upload: a request has no byte of its answer before all of it is sent."""
WHOLE_TIMEOUT_S = 86_400.0
"""Seconds for one request of which bytes keep coming."""


@functools.cache
def _first_process() -> int:
    """Return the id of the process that first called this; a forked child has the result of its parent."""
    return os.getpid()


def refuse_fork() -> None:
    """Raise `StorageError` in a child forked from a process that has opened an object store."""
    if _first_process() != os.getpid():
        raise StorageError(
            "a forked process cannot use the object store that its parent has opened: start it with the method 'spawn'"
        )


@dataclass(frozen=True, slots=True)
class StoreClient:
    """One bucket; obstore's stores keep connections and can be used from any thread."""

    store: Any
    uploads: Any
    """The same for the parts of uploads, with a longer time limit."""


def open_store(place: StoreAddress) -> StoreClient:
    """Return the client of a bucket, with its credentials and time limits; the bucket need not exist."""
    refuse_fork()
    options: dict[str, Any] = {
        "allow_http": place.http,
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=WHOLE_TIMEOUT_S),
    }
    if place.ca_file is not None:
        try:
            options["root_certificate"] = place.ca_file.read_bytes()
        except OSError as error:
            raise StorageError(f"the certificates in {place.ca_file} cannot be read: {error.strerror}") from None
    retries = {
        "max_retries": ATTEMPTS - 1,
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=2), "base": 3},
        **place.retry,
    }
    timeouts = REQUEST_TIMEOUT_S, PART_TIMEOUT_S
    # obstore asks Azure's command line only if told to.
    config = place.config
    if place.kind == "abfs":
        config = {**config, "use_azure_cli": is_logged_in_to_azure(os.environ)}
    kinds: dict[str, Any] = {"s3": stores.S3Store, "gcs": stores.GCSStore, "abfs": stores.AzureStore}

    def opened(timeout_s: float, **provider: Any) -> Any:
        limits = {**options, "read_timeout": timedelta(seconds=timeout_s)}
        made = kinds[place.kind]
        return made(place.bucket, config=config, client_options=limits, retry_config=retries, **provider)

    provider = _provider(place)
    try:
        return StoreClient(*(opened(timeout_s, **provider) for timeout_s in timeouts))
    except GenericError as error:
        found = google_credentials() if place.kind == "gcs" else None
        if found is None:
            raise StorageError(f"the bucket {place.bucket} could not be opened: {store_reason(str(error))}") from None
        # Its own library reads more kinds of Google's files of credentials.
        return StoreClient(*(opened(timeout_s, credential_provider=found) for timeout_s in timeouts))


def _provider(place: StoreAddress) -> dict[str, Any]:
    """Return the argument with the source of credentials, if obstore's own is not the right one."""
    found: Provider | None = None
    if place.kind == "s3":
        found = aws_credentials(os.environ)
    elif place.kind == "gcs" and "skip_signature" in place.config:
        found = no_credentials
    return {} if found is None else {"credential_provider": found}


_CODE = re.compile(r"<Code>\s*(.*?)\s*</Code>.*?<Message>\s*(.*?)\s*(?:\n.*?)?</Message>", re.DOTALL)
_PROVIDER = re.compile(r"External \w+ credential provider: (?:\w+: )?(.*)")
_STATUS = re.compile(r"status code: (\d+ [^:]*): ?(.*)", re.DOTALL)


def store_reason(text: str) -> str:
    """Return obstore's error as one short line: the store's own words, if it has answered.

    >>> store_reason("Generic S3 error: Error performing PUT http://host/a in 1ms - Server returned non-2xx "
    ...     "status code: 503 Slow Down: <Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>")
    '503 Slow Down: SlowDown: Reduce your rate.'
    """
    said, _, details = text.partition("\n\nDebug source:")
    if answered := _STATUS.search(said):
        status, body = answered.groups()
        described = _CODE.search(body)
        words = ": ".join(described.groups()) if described else body.strip().partition("\n")[0][:200]
        return f"{status}: {words}" if words else status
    if "HTTP error" in said:
        if "kind: Timeout" in details or "TimedOut" in details:
            return "the store did not answer in time"
        return "the store cannot be reached" if "kind: Connect" in details else "the store dropped the connection"
    if found := _PROVIDER.search(said):
        return found[1]
    line = said.partition("\n")[0].removeprefix("Generic ")
    # Queries of addresses may hold a signature.
    return re.sub(r"\?\S*", "", line)
