"""Leaving a collective at once: cut the sockets of a world, so that whoever waits on them sees an error.

The sockets are recognised by the addresses that members published at our rendezvous, not by which descriptors are new:
other libraries of the process open sockets, too.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection


def cut(listening: Collection[tuple[str, int]], *, listeners: bool) -> int:
    """Shuts down every TCP connection of this process from or to one of `listening`; how many.

    With `listeners` also the sockets that listen there: who waits for a connection that never comes is let go, too. Not
    for torch's Gloo, which ends the process when it cannot accept. The descriptors stay open: who opened them closes
    them.
    """
    done = 0
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not listeners:
                    continue
                if _ends(copy) & set(listening):
                    copy.shutdown(socket.SHUT_RDWR)
                    done += 1
        except OSError:
            # Closed by its owner since it was listed, or not connected any more: nothing is left to cut.
            continue
    return done


def _ends(sock: socket.socket) -> set[tuple[str, int]]:
    ends = {(sock.getsockname()[0], sock.getsockname()[1])}
    try:
        peer = sock.getpeername()
    except OSError:
        return ends
    return ends | {(peer[0], peer[1])}
