"""A local S3 server (moto), and a proxy in front of it that fails as networks and stores do."""

from __future__ import annotations

import http.client
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            patch.setenv(name, "true")
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        host, port = server.server_address
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=bucket)
        yield host, port
    server.shutdown()
    thread.join(10)
    server.server_close()


def at(place: str, server: str) -> str:
    """Return the address of a place on a test server."""
    return f"{place}?endpoint_override={server}&region=us-east-1&scheme=http"


class Proxy(ThreadingHTTPServer):
    """A proxy that forwards one request at a time: moto checks and puts in two steps, S3 in one."""

    daemon_threads = True

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
            if key.lower() not in ("transfer-encoding", "expect", *(["if-none-match"] if self.server.careless else []))
        }
        store.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = store.getresponse()
        data = answer.read()
        store.close()
        kept = [(key, value) for key, value in answer.getheaders() if key.lower() not in ("connection", "date")]
        return answer.status, kept, data

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def relaying(store: tuple[str, int]) -> Iterator[Proxy]:
    """Yield a proxy in front of a store."""
    server = Proxy(store)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()
