"""Local object stores, and a proxy in front of them that fails as networks and stores do.

s3         moto
gs, abfs   tests.unit.storage.cloud
azurite    Microsoft's own server, if `npm install azurite` was run in ~/.cache/raytrain-azurite
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO

import pytest

from tests.support.servers import running
from tests.unit.storage.cloud import Azure, Google, Quiet, remembering

AZURITE = Path("~/.cache/raytrain-azurite/node_modules/azurite/dist/src/blob/main.js").expanduser()
ACCOUNT = "devstoreaccount1"
"""The account that all local servers of Azure have, and its key, which is public."""
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
KINDS = ("s3", "gs", "abfs", "azurite")


@contextmanager
def serving(bucket: str) -> Iterator[tuple[str, int]]:
    """Yield host and port of an S3 server with this bucket; its keys are in the environment, also of new processes."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    # Moto's own server finds out for each request again which of AWS's services is meant, which takes longer than to
    # serve it.
    app = moto.create_backend_app("s3")
    server = serving.make_server("127.0.0.1", 0, app, threaded=True, request_handler=moto.MotoRequestHandler)
    with running(server), pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            patch.setenv(name, "true")
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        host, port = server.server_address
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=bucket)
        yield host, port


@contextmanager
def serving_azure(bucket: str) -> Iterator[tuple[str, int]]:
    """Yield host and port of a running Azurite with this container; skips the test if it is not installed."""
    node = shutil.which("node")
    if node is None or not AZURITE.is_file():
        pytest.skip("Azurite is not installed: npm install --prefix ~/.cache/raytrain-azurite azurite")
    command = [node, str(AZURITE), "--blobPort", "0", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--disableTelemetry"], stdout=log, stderr=log, cwd=AZURITE.parent)
        try:
            with account():
                port = listening(process, log)
                create_container(port, bucket)
                yield "127.0.0.1", port
        finally:
            process.kill()
            process.wait(10)


def listening(process: subprocess.Popen[bytes], log: IO[str]) -> int:
    """Return the port that a server reports in its log."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        if found := re.search(r"successfully listens on \S+:(\d+)", log.read()):
            return int(found[1])
        time.sleep(0.05)
    log.seek(0)
    raise AssertionError(f"Azurite does not start: {log.read()}")


@contextmanager
def account() -> Iterator[None]:
    """Put the key of the local account into the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        yield


def create_container(port: int, name: str) -> None:
    """Create a container on an Azurite."""
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = [*(f"{key}:{value}" for key, value in headers.items()), f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    signed = hmac.new(base64.b64decode(KEY), "\n".join(["PUT", *[""] * 11, *lines]).encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed.digest()).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()


@contextmanager
def serving_kind(kind: str, bucket: str) -> Iterator[tuple[str, int]]:
    """Yield host and port of a server of one of `KINDS` with this bucket."""
    if kind in ("s3", "azurite"):
        with (serving if kind == "s3" else serving_azure)(bucket) as store:
            yield store
        return
    with account(), remembering(bucket, Google if kind == "gs" else Azure) as server:
        yield str(server.server_address[0]), server.server_port


def address_of(kind: str, place: str, host: str, port: int) -> str:
    """Return the address of `place`, which begins with a bucket, on a server of one of `KINDS`."""
    if kind == "s3":
        return at(f"s3://{place}", f"http://{host}:{port}")
    if kind == "gs":
        return f"gs://anonymous@{place}?endpoint_override={host}:{port}&scheme=http"
    return f"abfs://{ACCOUNT}@{host}:{port}/{place}?enable_tls=false"


def at(place: str, server: str) -> str:
    """Return the address of a place on a test server."""
    return f"{place}?endpoint_override={server}&region=us-east-1&scheme=http"


class Proxy(Quiet):
    """A proxy that forwards one request at a time: moto checks and puts in two steps, S3 in one."""

    def __init__(self, store: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Relay)
        self.store = store
        self.one = threading.Lock()
        self.well()

    def well(self) -> None:
        """Reset: forward every request and every answer from now on."""
        self.answers: list[tuple[int, str]] = []
        """Statuses and codes of the next answers, which are given without asking the store."""
        self.refuse: Callable[[str, str], bool] = lambda method, path: False
        """Whether a request is refused."""
        self.lose: Callable[[str, str], bool] = lambda method, path: False
        """Whether the answer to a request gets lost."""
        self.seen: list[tuple[str, str]] = []
        self.careless = False
        """Whether it ignores conditions: creating an object replaces an existing one."""
        self.down = False
        """Whether every request is answered with 500."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


CONDITIONS = ("if-none-match", "x-goog-if-generation-match")


class Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def relay(self) -> None:
        body = self._body()
        with self.server.one:
            self.server.seen.append((self.command, self.path))
            refused = self.server.refuse(self.command, self.path)
            if refused or self.server.answers or self.server.down:
                status, code = self._answer(refused)
                data = f"<Error><Code>{code}</Code><Message>said the store</Message></Error>".encode()
                headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(data)))]
            else:
                status, headers, data = self._asked(body)
        if self.server.lose(self.command, self.path):
            self.close_connection = True
            return
        self.send_response(status)
        for header in headers:
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, refused: bool) -> tuple[int, str]:
        if refused:
            return 403, "AccessDenied"
        return self.server.answers.pop(0) if self.server.answers else (500, "InternalError")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        store = http.client.HTTPConnection(*self.server.store, timeout=30)
        headers = {
            key: value
            for key, value in self.headers.items()
            if key.lower()
            not in ("transfer-encoding", "expect", "content-length", *(CONDITIONS if self.server.careless else ()))
        }
        store.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = store.getresponse()
        data = answer.read()
        store.close()
        dropped = ("connection", "date", "transfer-encoding")
        kept = [(key, value) for key, value in answer.getheaders() if key.lower() not in dropped]
        if answer.chunked:
            kept.append(("Content-Length", str(len(data))))
        return answer.status, kept, data

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def relaying(store: tuple[str, int]) -> Iterator[Proxy]:
    """Yield a proxy in front of a store."""
    server = Proxy(store)
    with running(server):
        yield server
