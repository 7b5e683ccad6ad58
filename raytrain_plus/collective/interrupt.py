"""Interrupt a collective: shut down the sockets of a world, so that every thread waiting on them gets an error.

The sockets are recognised by the addresses that members published at our rendezvous, not by new descriptors: other
libraries of the process open sockets, too.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

Address = tuple[str, int]

_SYN_SENT = "02"


def close_connections(listening: Collection[Address], *, listeners: bool) -> int:
    """Shut down every TCP connection of this process from or to one of `listening`; return how many.

    That includes connections still being made to a machine that does not answer. With `listeners`, it also shuts down
    the sockets that listen there, which releases a thread that waits for a connection that never comes. Do not use
    `listeners` with torch's Gloo, which ends the process if it cannot accept. The descriptors stay open; their owners
    close them.
    """
    done = 0
    wanted, connecting = set(listening), _connecting()
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with _shared(descriptor) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not listeners:
                    continue
                if not wanted.isdisjoint(_ends(copy, connecting.get(status.st_ino))):
                    copy.shutdown(socket.SHUT_RDWR)
                    done += 1
        except OSError:
            # The owner has closed it since it was listed, or it is no longer connected: nothing is left to shut down.
            continue
    return done


@contextmanager
def _shared(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object on a duplicate of the descriptor. Both share one blocking mode, which is kept."""
    duplicate = os.dup(descriptor)
    blocking = os.get_blocking(duplicate)
    try:
        copy = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with copy:
        # If user code has set a default timeout, every new socket object changes the mode.
        os.set_blocking(duplicate, blocking)
        yield copy


def _ends(sock: socket.socket, connecting_to: Address | None) -> list[Address]:
    here: Address = sock.getsockname()[:2]
    try:
        return [here, sock.getpeername()[:2]]
    except OSError:
        return [here] if connecting_to is None else [here, connecting_to]


def _connecting() -> dict[int, Address]:
    """Return inode -> remote address for each socket that is connecting; only this kernel file lists them."""
    found: dict[int, Address] = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        if state == _SYN_SENT:
            address, port = remote.split(":")
            found[int(inode)] = (socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16))
    return found
