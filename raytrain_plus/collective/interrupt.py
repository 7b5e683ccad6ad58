"""Leaving a collective at once: cut the sockets of a world, so that whoever waits on them sees an error.

The sockets are recognised by the addresses that members published at our rendezvous, not by which descriptors are new:
other libraries of the process open sockets, too.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection


def cut(listening: Collection[tuple[str, int]]) -> int:
    """Shuts down every TCP connection of this process from or to one of `listening`.

    Returns how many. The descriptors stay open: who opened them closes them. Those that listen are left alone: torch's
    Gloo ends the process when it cannot accept.
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
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
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
