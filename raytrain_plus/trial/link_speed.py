"""Measure how fast two sockets of this machine exchange bytes: latency, and bytes per second."""

from __future__ import annotations

import socket
import threading
import time

from raytrain_plus.planner.layer_profile import LinkSpeed

LARGE = 16 << 20
"""Bytes of the message that gives the speed."""
TIMES = 20
"""Small messages there and back; the fastest counts."""
WAIT_S = 10.0
"""Maximum seconds of a message."""


def measure_link() -> LinkSpeed:
    """Return the speed of a connection over the loopback device, as workers on one machine have."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_answer, args=(server,), daemon=True)
        answering.start()
        with socket.create_connection(server.getsockname(), timeout=WAIT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small = min(_there_and_back(link, 1) for _ in range(TIMES))
            large = min(_there_and_back(link, LARGE) for _ in range(3))
        answering.join(WAIT_S)
    return LinkSpeed(small / 2, LARGE / max(large - small, 1e-9))


def _there_and_back(link: socket.socket, size: int) -> float:
    """Return the seconds of a message, and of its answer of one byte."""
    start = time.perf_counter()
    link.sendall(size.to_bytes(8, "big") + bytes(size))
    link.recv(1)
    return time.perf_counter() - start


def _answer(server: socket.socket) -> None:
    server.settimeout(WAIT_S)
    link, _ = server.accept()
    room = bytearray(LARGE)
    with link:
        link.settimeout(WAIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := link.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            while left:
                left -= link.recv_into(room, left)
            link.sendall(b"x")
