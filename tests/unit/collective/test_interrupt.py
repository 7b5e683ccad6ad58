"""Only the sockets of the world are shut down."""

import errno
import os
import select
import socket
import time

import pytest

from raytrain_plus.collective.interrupt import close_connections


def pair(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server((address, 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_only_the_named_sockets_are_shut_down() -> None:
    world, other = pair(), pair()
    try:
        assert close_connections([world[0].getsockname()], listeners=False) == 2  # both ends of its connection
        for end in world[1:]:
            assert end.recv(1) == b""
        other[1].sendall(b"x")
        assert other[2].recv(1) == b"x"
    finally:
        for end in (*world, *other):
            end.close()


def test_a_listening_thread_is_released_on_request() -> None:
    listener, client, server = pair()
    try:
        assert close_connections([listener.getsockname()], listeners=True) == 3
        with pytest.raises(OSError):
            listener.accept()
    finally:
        for end in (listener, client, server):
            end.close()


def test_a_thread_connecting_to_a_silent_machine_is_released() -> None:
    # A listener with a full queue does not answer, like a machine that is gone.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            time.sleep(0.1)
            last = waiting[-1]
            with pytest.raises(OSError, match="not connected"):
                last.getpeername()
            assert close_connections([silent.getsockname()], listeners=False) == len(waiting)
            assert select.select([], [last], [], 1)[1] == [last]
            assert last.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
        finally:
            for one in waiting:
                one.close()


def test_no_socket_changes_its_blocking_mode() -> None:
    listener, client, server = pair()
    local = socket.socketpair()
    try:
        socket.setdefaulttimeout(3)
        close_connections([("127.0.0.1", 1)], listeners=True)
        assert [os.get_blocking(one.fileno()) for one in (listener, client, server, *local)] == [True] * 5
    finally:
        socket.setdefaulttimeout(None)
        for end in (listener, client, server, *local):
            end.close()
