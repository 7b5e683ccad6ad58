"""Folders on object stores: a local S3, behind a proxy that fails as networks and stores do."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain_plus.errors import InputError
from raytrain_plus.runs.folder import Fence, single_writer
from raytrain_plus.state.stored.checkpoint import sweep
from raytrain_plus.state.stored.manifest import FOLDER
from raytrain_plus.storage.folders import remote
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.folders.remote import RemoteFolder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.probe import keeps_others_out
from tests.support.states import load, same, save, state
from tests.unit.storage.store import Proxy, at, relaying, serving

boto3 = pytest.importorskip("boto3")
s3 = pytest.importorskip("raytrain_plus.storage.folders.s3")

BUCKET = "runs"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, int]]:
    """The host and port of an S3 server with a bucket."""
    with serving(BUCKET) as where:
        yield where


@pytest.fixture(scope="module")
def relay(store: tuple[str, int]) -> Iterator[Proxy]:
    """The proxy in front of the store."""
    with relaying(store) as server:
        yield server


@pytest.fixture(scope="module")
def root(relay: Proxy) -> Folder:
    """The whole bucket, reached through the proxy."""
    return open_folder(at(f"s3://{BUCKET}", relay.address))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses of boto3 between its attempts, which are random and up to 2 s."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)


@pytest.fixture
def proxy(relay: Proxy) -> Proxy:
    """The proxy without any failures."""
    relay.well()
    return relay


@pytest.fixture
def folder(root: Folder, proxy: Proxy, tmp_path: Path) -> Folder:
    """An empty folder on S3, reached through the proxy."""
    return root.inside(tmp_path.name)


@pytest.fixture
def bare(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The same without boto3."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "raytrain_plus.storage.folders.s3", raising=False)
    return open_folder(address(proxy, tmp_path.name))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload in parts of the smallest size that S3 takes."""
    monkeypatch.setattr(s3, "PART", 5 * MEGABYTE)


def address(proxy: Proxy, path: str, bucket: str = BUCKET) -> str:
    """Return the address of a folder, through the proxy."""
    return at(f"s3://{bucket}/{path}", proxy.address)


def uploads(store: tuple[str, int]) -> list[object]:
    """Return the uploads that were neither completed nor aborted."""
    client = boto3.client("s3", endpoint_url="http://{}:{}".format(*store), region_name="us-east-1")
    found: list[object] = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return found


def pieces(*sizes: int) -> Iterator[bytes]:
    """Yield pieces with different bytes."""
    for number, size in enumerate(sizes):
        yield bytes([number]) * size


# The behaviour of pyarrow because of which incomplete files are never closed under their own name.


def test_closing_a_pyarrow_stream_completes_the_object(store: tuple[str, int]) -> None:
    system = fs.S3FileSystem(endpoint_override="http://{}:{}".format(*store), region="us-east-1")

    def write() -> None:
        with system.open_output_stream(f"{BUCKET}/half") as stream:
            stream.write(b"half of it")
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write()
    assert system.get_file_info(f"{BUCKET}/half").size == len(b"half of it")


# Writing.


@pytest.mark.parametrize("sizes", [(), (5,), (5 * MEGABYTE,), (5 * MEGABYTE, 1), (1, 11 * MEGABYTE, 6 * MEGABYTE)])
@pytest.mark.usefixtures("small_parts")
def test_objects_of_any_size_are_whole(folder: Folder, store: tuple[str, int], sizes: tuple[int, ...]) -> None:
    folder.write("object", pieces(*sizes))
    assert folder.read("object") == b"".join(pieces(*sizes))
    assert not uploads(store)


def test_a_large_object(folder: Folder) -> None:
    folder.write("object", pieces(10 * MEGABYTE, 7 * MEGABYTE))
    assert folder.read("object") == b"".join(pieces(10 * MEGABYTE, 7 * MEGABYTE))


def test_a_large_object_without_boto3(bare: Folder) -> None:
    bare.write("object", pieces(3 * MEGABYTE, 12 * MEGABYTE))
    assert bare.read("object") == b"".join(pieces(3 * MEGABYTE, 12 * MEGABYTE))
    assert set(bare.files()) == {"object"}


@pytest.mark.parametrize("size", [10, 12 * MEGABYTE])
@pytest.mark.usefixtures("small_parts")
def test_an_upload_whose_data_fails_is_aborted(folder: Folder, store: tuple[str, int], size: int) -> None:
    def half() -> Iterator[bytes]:
        yield bytes(size)
        raise KeyboardInterrupt

    folder.write("object", [b"whole"])
    with pytest.raises(KeyboardInterrupt):
        folder.write("object", half())
    assert folder.read("object") == b"whole"
    assert not uploads(store)


@pytest.mark.usefixtures("small_parts")
def test_an_upload_with_a_failed_part_is_aborted(folder: Folder, proxy: Proxy, store: tuple[str, int]) -> None:
    folder.write("object", [b"whole"])
    proxy.refuse = lambda method, path: "partNumber=2" in path
    with pytest.raises(OSError, match=r"object could not be written: .*AccessDenied"):
        folder.write("object", pieces(*[5 * MEGABYTE] * 3))
    assert folder.read("object") == b"whole"
    assert not uploads(store)


@pytest.mark.parametrize("size", [10, 12 * MEGABYTE])
def test_a_write_without_boto3_whose_data_fails_leaves_nothing(bare: Folder, proxy: Proxy, size: int) -> None:
    def half() -> Iterator[bytes]:
        yield bytes(size)
        raise ValueError("no more")

    bare.write("object", [b"whole"])
    with pytest.raises(ValueError, match="no more"):
        bare.write("object", half())
    assert bare.read("object") == b"whole"
    left = fs.S3FileSystem(endpoint_override=proxy.address, region="us-east-1").get_file_info(
        fs.FileSelector(bare.where.removeprefix("s3://"), recursive=True)
    )
    assert [info.base_name for info in left if info.type == fs.FileType.File] == ["object"]


# Creating.


def test_only_one_of_two_concurrent_creates_succeeds(folder: Folder) -> None:
    start = threading.Barrier(2, timeout=30)

    def create(number: int, who: bytes) -> bool:
        start.wait()
        return folder.create(f"claim-{number}", who)

    assert folder.exclusive
    with ThreadPoolExecutor(2) as pool:
        for number in range(10):
            first, second = pool.map(create, (number, number), (b"first", b"second"))
            assert first != second
            assert folder.read(f"claim-{number}") == (b"first" if first else b"second")


def test_a_create_whose_answer_is_lost_succeeds(folder: Folder, proxy: Proxy) -> None:
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        if method == "PUT" and not lost:
            lost.append(path)
            return True
        return False

    proxy.lose = lose
    assert folder.create("claim", b"token-1")
    assert [method for method, _ in proxy.seen].count("PUT") == 2
    assert folder.create("claim", b"token-1")
    assert not folder.create("claim", b"token-2")


def test_a_conflict_is_retried(folder: Folder, proxy: Proxy) -> None:
    proxy.answers = [(409, "ConditionalRequestConflict")]
    assert folder.create("claim", b"x")
    assert folder.read("claim") == b"x"


def test_repeated_conflicts_are_an_error(folder: Folder, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "CONFLICT_WAIT_S", 0.0)
    proxy.answers = [(409, "ConditionalRequestConflict")] * 100
    with pytest.raises(OSError, match="claim could not be created: 10 attempts conflicted with other writers"):
        folder.create("claim", b"x")


def test_an_object_removed_after_a_failed_create_is_not_ours(folder: Folder, proxy: Proxy) -> None:
    proxy.answers = [(412, "PreconditionFailed")]
    assert not folder.create("claim", b"x")


def test_a_store_that_ignores_conditions_is_detected(folder: Folder, proxy: Proxy) -> None:
    assert keeps_others_out(folder)
    proxy.careless = True
    assert folder.exclusive
    assert not keeps_others_out(folder)
    run = folder.inside("run")
    Fence(run, 0)
    assert not single_writer(run)
    assert set(folder.files()) == {"run/claims/00000001.json"}


def test_without_boto3_everything_but_exclusive_create_works(bare: Folder) -> None:
    assert not bare.exclusive
    assert bare.create("claim", b"mine")
    assert not bare.create("claim", b"yours")
    assert bare.create("claim", b"mine")
    assert bare.read("claim") == b"mine"
    bare.inside("run").write("a/file", [b"x"])
    bare.inside("run").move("aside")
    assert set(bare.files()) == {"claim", "aside/a/file"}
    bare.remove("aside")
    assert set(bare.files()) == {"claim"}


# Listing and moving.


def test_folder_markers_and_unfinished_files_are_not_listed(folder: Folder, proxy: Proxy, tmp_path: Path) -> None:
    system, path = fs.FileSystem.from_uri(address(proxy, tmp_path.name))
    system.create_dir(f"{path}/empty/folder", recursive=True)
    with system.open_output_stream(f"{path}/.object.0123.part") as stream:
        stream.write(b"half")
    folder.write("object", [b"x"])
    assert set(folder.files()) == {"object"}


def test_a_bucket_cannot_be_renamed(root: Folder) -> None:
    with pytest.raises(OSError, match=r"s3://runs is a whole bucket and cannot be renamed"):
        root.move("other")


def test_a_missing_folder_cannot_be_moved(folder: Folder) -> None:
    with pytest.raises(FileNotFoundError, match="folder not found"):
        folder.inside("nothing").move("other")


def test_a_failed_move_changes_nothing(folder: Folder, proxy: Proxy) -> None:
    run = folder.inside("run")
    run.write("file", [b"x"])
    proxy.lose = lambda method, path: method == "PUT"
    with pytest.raises(OSError, match=r"run/file could not be copied to s3://"):
        run.move("aside")
    proxy.lose = lambda method, path: False
    assert run.read("file") == b"x"


# Failures of the store.


def calls(folder: Folder) -> dict[str, Callable[[], object]]:
    return {
        "written": lambda: folder.write("object", [b"x"]),
        "created": lambda: folder.create("object", b"x"),
        "read": lambda: folder.read("object"),
        "listed": lambda: folder.files(),
        "removed": lambda: folder.remove("object"),
    }


@pytest.mark.parametrize("done", ["written", "created", "read", "listed", "removed"])
def test_a_refusal_says_what_could_not_be_done(folder: Folder, proxy: Proxy, done: str) -> None:
    proxy.answers = [(403, "AccessDenied")] * 10
    with pytest.raises(OSError, match=rf"s3://runs/.* could not be {done}: .*(?i:access.?denied)"):
        calls(folder)[done]()
    assert len(proxy.answers) == 9, "a refusal is final"


@pytest.mark.parametrize(
    ("done", "status", "code"),
    [("created", 503, "SlowDown"), pytest.param("listed", 500, "InternalError", marks=pytest.mark.slow)],
)
def test_a_failing_store_is_retried_and_then_reported(
    folder: Folder, proxy: Proxy, done: str, status: int, code: str
) -> None:
    proxy.answers = [(status, code)] * 10
    with pytest.raises(OSError, match=rf"s3://runs/.* could not be {done}: .*(?i:{code[:4]})"):
        calls(folder)[done]()
    assert len(proxy.answers) == 7, "the libraries try three times"


def test_a_single_failure_of_a_store_is_retried(folder: Folder, proxy: Proxy) -> None:
    proxy.answers = [(503, "SlowDown")]
    folder.write("object", [b"x"])
    assert folder.read("object") == b"x"


@pytest.mark.slow
def test_a_store_that_never_answers_times_out(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 1.0)
    folder = open_folder(address(proxy, "never"))
    free = threading.Event()
    proxy.lose = lambda method, path: bool(free.wait(60)) or True
    try:
        with ThreadPoolExecutor(2) as pool:
            reading, writing = pool.submit(folder.read, "object"), pool.submit(folder.write, "object", [b"x"])
            with pytest.raises(OSError, match=r"object could not be read: .*Timeout was reached"):
                reading.result(30)
            with pytest.raises(OSError, match=r"object could not be written: Read timeout"):
                writing.result(30)
    finally:
        free.set()


@pytest.mark.parametrize("kind", ["folder", "bare"])
def test_a_missing_bucket_is_reported(proxy: Proxy, request: pytest.FixtureRequest, kind: str) -> None:
    request.getfixturevalue(kind)
    nowhere = open_folder(address(proxy, "a", bucket="nowhere"))
    with pytest.raises(OSError, match=r"s3://nowhere/a/object could not be written: .*bucket does not exist"):
        nowhere.write("object", [b"x"])
    with pytest.raises(OSError, match=r"s3://nowhere/a/object could not be (created|written): .*bucket does not exist"):
        nowhere.create("object", b"x")


# Addresses.


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("ftp://host/runs", "Unrecognized filesystem type"),
        ("https://host/runs", "Unrecognized filesystem type"),
        ("s3:///runs", "Missing bucket name"),
        ("s3://bucket/runs?regio=x", "Unexpected query parameter in S3 URI: 'regio'"),
        ("s3://bucket/ru ns?region=x", "Cannot parse URI"),
        ("s3://bucket/a//b?region=x", "an empty part"),
        ("s3://bucket/a/../b?region=x", "an empty part, '.' or '..'"),
        ("s3://", "its path is empty"),
        ("abfs://box@account.dfs.core.windows.net/runs?keey=secret", "Unexpected query parameter"),
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
    ],
)
def test_an_address_with_a_credential_is_refused(where: str) -> None:
    """In the past its user name and password were used and only hidden from messages, and its parameters were not."""
    with pytest.raises(InputError, match="the address contains a credential: ") as caught:
        open_folder(where)
    for text in (str(caught.value), repr(caught.value)):
        assert "pa55" not in text
        assert "KEYID" not in text


def test_errors_of_a_client_show_no_credentials() -> None:
    """The environment may name a proxy or an endpoint with a password in its address."""
    folder = RemoteFolder(Telling(), "runs", "hdfs://host/runs")
    with pytest.raises(OSError, match=r"could not be listed: no answer from http://\*\*\*@proxy") as caught:
        folder.files()
    assert "pa55" not in "".join(traceback.format_exception(caught.value))


class Telling:
    """A file system whose errors repeat an address."""

    type_name = "hdfs"

    def get_file_info(self, wanted: object) -> None:
        raise OSError("no answer from http://me:pa55word@proxy:80/runs")


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("s3://bucket/runs?region=x", "s3://bucket/runs"),
        ("gs://anonymous@bucket/runs?retry_limit_seconds=1", "gs://anonymous@bucket/runs"),
        ("hdfs:///runs", "hdfs:///runs"),
    ],
)
def test_an_address_is_shown_without_settings(where: str, shown: str) -> None:
    assert RemoteFolder(fs.LocalFileSystem(), "runs", where).where == shown


def test_a_path_in_the_form_of_an_address_is_a_local_folder(tmp_path: Path) -> None:
    folder = open_folder(f"file://{tmp_path}/runs")
    assert isinstance(folder, LocalFolder)
    assert folder.where == f"{tmp_path}/runs"


# File systems that are not object stores.


def test_a_file_system_file_is_written_under_another_name_first(tmp_path: Path) -> None:
    folder = RemoteFolder(fs.LocalFileSystem(), str(tmp_path), "hdfs://host/runs")
    before: list[set[str]] = []

    def data() -> Iterator[bytes]:
        yield b"half"
        before.append({path.name for path in (tmp_path / "a").iterdir()})

    folder.write("a/file", data())
    assert [name.startswith(".file.") and name.endswith(".part") for name in before[0]] == [True]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    assert not folder.exclusive


# Checkpoints, if the store fails for good at any moment.


def fails_from(number: int, lost: bool, proxy: Proxy) -> None:
    """Refuse all requests from this number on, or (`lost`) perform them without an answer."""
    proxy.well()

    def late(method: str, path: str) -> bool:
        return len(proxy.seen) > number

    if lost:
        proxy.lose = late
    else:
        proxy.refuse = late


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["refused", "lost"])
@pytest.mark.parametrize("kind", ["folder", pytest.param("bare", marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_after_any_permanent_failure_a_whole_checkpoint_exists(
    kind: str, lost: bool, every: int, proxy: Proxy, request: pytest.FixtureRequest
) -> None:
    """The store fails from each of `every` so many requests on."""
    run: Folder = request.getfixturevalue(kind)
    loaded: list[int] = []
    for number in itertools.count(0, every):
        proxy.well()
        run.remove(FOLDER)
        save(run, 4, writers=2)
        fails_from(number, lost, proxy)
        try:
            made = save(run, 9, generation=1, writers=2)
            sweep(run, [made.name], made)
        except OSError:
            ended = False
        else:
            ended = True
        proxy.well()
        step, read = load(run)
        assert same(read, state(step)), number
        loaded.append(step)
        if ended:
            break
    assert set(loaded) == {4, 9}
    assert loaded == sorted(loaded)
    assert list(run.files(FOLDER)) == [
        f"{FOLDER}/{made.name}.json",
        *(f"{FOLDER}/{made.name}/{file.name}" for file in made.files),
    ]
