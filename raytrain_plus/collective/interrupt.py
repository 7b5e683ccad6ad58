"""Leaving a collective at once: cut the sockets of a world, so that whoever waits on them sees an error.

The sockets are recognised by the addresses that members published at our rendezvous, not by which descriptors are new:
other libraries of the process open sockets, too.
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


def cut(listening: Collection[Address], *, listeners: bool) -> int:
    """Shuts down every TCP connection of this process from or to one of `listening`; how many.

    A connection that is being made to a machine that does not answer counts, too. With `listeners` also the sockets
    that listen there: who waits for a connection that never comes is let go, too. Not for torch's Gloo, which ends the
    process when it cannot accept. The descriptors stay open: who opened them closes them.
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
            # Closed by its owner since it was listed, or not connected any more: nothing is left to cut.
            continue
    return done


@contextmanager
def _shared(descriptor: int) -> Iterator[socket.socket]:
    """A socket object on a duplicate of the descriptor. Both share one blocking mode, which stays as it is."""
    duplicate = os.dup(descriptor)
    blocking = os.get_blocking(duplicate)
    try:
        copy = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with copy:
        # A default timeout, if the user's code has set one, makes every new socket object change the mode.
        os.set_blocking(duplicate, blocking)
        yield copy


def _ends(sock: socket.socket, connecting_to: Address | None) -> list[Address]:
    here: Address = sock.getsockname()[:2]
    try:
        return [here, sock.getpeername()[:2]]
    except OSError:
        return [here] if connecting_to is None else [here, connecting_to]


def _connecting() -> dict[int, Address]:
    """Inode of each socket that connects and has no answer yet -> where to: the kernel tells only here."""
    found: dict[int, Address] = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        if state == _SYN_SENT:
            address, port = remote.split(":")
            found[int(inode)] = (socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16))
    return found
