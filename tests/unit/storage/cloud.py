"""Local servers of Google Cloud Storage and Azure Blob Storage: the calls that obstore makes, with honest conditions.

They keep objects in memory and check no signatures. Each change is made under one lock, as in the real stores.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.servers import running


@dataclass(frozen=True)
class Object:
    data: bytes
    generation: int
    modified: float = field(default_factory=time.time)


class Answer(NamedTuple):
    status: int
    data: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Quiet(ThreadingHTTPServer):
    """A server whose clients may hang up."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Memory(Quiet):
    """A server of one bucket."""

    def __init__(self, bucket: str, speaks: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), speaks)
        self.bucket = bucket
        self.lock = threading.Lock()
        self.objects: dict[str, Object] = {}
        self.parts: dict[tuple[str, str], bytes] = {}
        """Parts of uploads that have not ended, by upload or object, and number or name."""
        self.uploads: set[str] = set()
        self.generation = 0

    def put(self, name: str, data: bytes) -> Object:
        self.generation += 1
        self.objects[name] = Object(data, self.generation)
        return self.objects[name]


class Handler(BaseHTTPRequestHandler):
    """What both have in common. A subclass answers a request by its method, object and query."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Memory
    depth = 1
    """Parts of a path before the object's name."""

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        above = url.path.split("/", self.depth + 1)[1:]
        self.query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        with self.server.lock:
            if unquote(above[self.depth - 1]) != self.server.bucket:
                answer = self.failed(404, "NoSuchBucket", "The specified bucket does not exist.")
            else:
                answer = self.answer(unquote(above[self.depth]) if len(above) > self.depth else "", body)
        self.send_response(answer.status)
        for header in answer.headers:
            self.send_header(*header)
        if not any(name == "Content-Length" for name, _ in answer.headers):
            self.send_header("Content-Length", str(len(answer.data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def answer(self, name: str, body: bytes) -> Answer:
        raise NotImplementedError

    def failed(self, status: int, code: str, message: str) -> Answer:
        data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return Answer(status, data.encode(), (("Content-Type", "application/xml"),))

    def described(self, one: Object) -> tuple[tuple[str, str], ...]:
        """Return the headers that describe an object."""
        return (
            ("ETag", f'"{one.generation}"'),
            ("Last-Modified", formatdate(one.modified, usegmt=True)),
            ("x-goog-generation", str(one.generation)),
            ("x-ms-blob-type", "BlockBlob"),
        )

    def got(self, name: str) -> Answer:
        one = self.server.objects.get(name)
        if one is None:
            return self.failed(404, "NoSuchKey", "The specified object does not exist.")
        if self.command == "HEAD":
            return Answer(200, b"", (*self.described(one), ("Content-Length", str(len(one.data)))))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return Answer(200, one.data, self.described(one))
        first, last = int(wanted[1]), min(int(wanted[2]), len(one.data) - 1)
        if first >= len(one.data):
            return self.failed(416, "InvalidRange", "The range is not satisfiable.")
        place = ("Content-Range", f"bytes {first}-{last}/{len(one.data)}")
        return Answer(206, one.data[first : last + 1], (*self.described(one), place))

    def removed(self, name: str, status: int) -> Answer:
        if self.server.objects.pop(name, None) is None:
            return self.failed(404, "NoSuchKey", "The specified object does not exist.")
        return Answer(status)

    def listed(self) -> list[tuple[str, Object]]:
        found = self.server.objects.items()
        return sorted((name, one) for name, one in found if name.startswith(self.query.get("prefix", "")))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Google(Handler):
    """The XML interface of Google Cloud Storage."""

    def answer(self, name: str, body: bytes) -> Answer:
        if not name:
            return self._list()
        if self.command in ("GET", "HEAD"):
            return self.got(name)
        upload = self.query.get("uploadId")
        if self.command == "POST":
            return self._begun() if upload is None else self._completed(name, upload, body)
        if self.command == "DELETE":
            return self.removed(name, 204) if upload is None else self._ended(upload, Answer(204))
        if upload is not None:
            self.server.parts[upload, self.query["partNumber"]] = body
            return Answer(200, b"", (("ETag", f'"{self.query["partNumber"]}"'),))
        return self._put(name, body)

    def _put(self, name: str, body: bytes) -> Answer:
        wanted, old = self.headers.get("x-goog-if-generation-match"), self.server.objects.get(name)
        if wanted is not None and int(wanted) != (old.generation if old else 0):
            return self.failed(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            body = self.server.objects[unquote(source).partition("/")[2]].data
        return Answer(200, b"<CopyObjectResult></CopyObjectResult>", self.described(self.server.put(name, body)))

    def _begun(self) -> Answer:
        upload = f"upload-{len(self.server.uploads)}-{time.monotonic_ns()}"
        self.server.uploads.add(upload)
        names = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
        return Answer(200, f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>".encode())

    def _completed(self, name: str, upload: str, body: bytes) -> Answer:
        numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
        data = b"".join(self.server.parts[upload, number] for number in sorted(numbers, key=int))
        made = self.server.put(name, data)
        tag = f"<CompleteMultipartUploadResult><ETag>{made.generation}</ETag></CompleteMultipartUploadResult>"
        return self._ended(upload, Answer(200, tag.encode(), self.described(made)))

    def _ended(self, upload: str, answer: Answer) -> Answer:
        self.server.uploads.discard(upload)
        for part in [part for part in self.server.parts if part[0] == upload]:
            del self.server.parts[part]
        return answer

    def _list(self) -> Answer:
        if "uploads" in self.query:
            return Answer(200, "".join(f"<UploadId>{one}</UploadId>" for one in self.server.uploads).encode())
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(one.data)}</Size><ETag>{one.generation}</ETag>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(one.modified))}</LastModified>"
            "</Contents>"
            for name, one in self.listed()
        )
        return Answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())


class Azure(Handler):
    """Azure Blob Storage. Uploads are not aborted there: parts that nothing names disappear after a week."""

    depth = 2

    def answer(self, name: str, body: bytes) -> Answer:
        if not name:
            return self._list() if self.query["comp"] == "list" else self._batch(body)
        if self.command in ("GET", "HEAD"):
            return self.got(name)
        if self.command == "DELETE":
            return self.removed(name, 202)
        if self.query.get("comp") == "block":
            self.server.parts[name, self.query["blockid"]] = body
            return Answer(201)
        if self.query.get("comp") == "blocklist":
            blocks = re.findall("<Uncommitted>(.*?)</Uncommitted>", body.decode())
            body = b"".join(self.server.parts.pop((name, block)) for block in blocks)
        return self._put(name, body)

    def _put(self, name: str, body: bytes) -> Answer:
        old = self.server.objects.get(name)
        if self.headers.get("If-None-Match") == "*" and old is not None:
            return self.failed(409, "BlobAlreadyExists", "The specified blob already exists.")
        if self.headers.get("If-Match", old and f'"{old.generation}"') != (old and f'"{old.generation}"'):
            return self.failed(412, "ConditionNotMet", "The condition is not met.")
        source = self.headers.get("x-ms-copy-source")
        if source is None:
            return Answer(201, b"", self.described(self.server.put(name, body)))
        copied = self.server.objects.get(unquote(urlsplit(source).path.split("/", 3)[3]))
        if copied is None:
            return self.failed(404, "BlobNotFound", "The specified blob does not exist.")
        return Answer(202, b"", (*self.described(self.server.put(name, copied.data)), ("x-ms-copy-status", "success")))

    def _batch(self, body: bytes) -> Answer:
        boundary = self.headers["Content-Type"].partition("boundary=")[2]
        answers = []
        for number, path in enumerate(re.findall(r"DELETE (\S+) HTTP", body.decode())):
            gone = self.server.objects.pop(unquote(path.split("/", 3)[3]), None)
            status = (
                "202 Accepted\r\n"
                if gone
                else "404 The specified blob does not exist.\r\nx-ms-error-code: BlobNotFound\r\n"
            )
            part = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
            answers.append(f"--{boundary}\r\n{part}")
        data = "".join([*answers, f"--{boundary}--\r\n"]).encode()
        return Answer(202, data, (("Content-Type", f"multipart/mixed; boundary={boundary}"),))

    def _list(self) -> Answer:
        found = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(one.modified, usegmt=True)}"
            f"</Last-Modified><Etag>{one.generation}</Etag><Content-Length>{len(one.data)}</Content-Length>"
            "<Content-Type>x</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, one in self.listed()
        )
        return Answer(200, f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>".encode())


@contextmanager
def remembering(bucket: str, speaks: type[Handler]) -> Iterator[Memory]:
    """Yield a server of this bucket."""
    server = Memory(bucket, speaks)
    with running(server):
        yield server
