"""Cutting sockets: those of the world, and no others."""

import socket

import pytest

from raytrain_plus.collective.interrupt import cut


def pair(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server((address, 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_only_the_named_sockets_are_cut() -> None:
    world, other = pair(), pair()
    try:
        assert cut([world[0].getsockname()], listeners=False) == 2  # both ends of its connection
        for end in world[1:]:
            assert end.recv(1) == b""
        other[1].sendall(b"x")
        assert other[2].recv(1) == b"x"
    finally:
        for end in (*world, *other):
            end.close()


def test_who_waits_for_a_connection_is_let_go_where_that_is_wanted() -> None:
    listener, client, server = pair()
    try:
        assert cut([listener.getsockname()], listeners=True) == 3
        with pytest.raises(OSError):
            listener.accept()
    finally:
        for end in (listener, client, server):
            end.close()
