"""Test a Horovod build: two processes sum a tensor through it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.errors import RunError

PROOF_S = 120.0

_MEMBER = """
import json, sys, torch
from raytrain_plus.collective.member_credentials import Credentials
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.horovod_world import HorovodWorld
from raytrain_plus.collective.world import wait
given = json.load(sys.stdin)
given["credentials"] = Credentials(given["credentials"]["token"], tuple(given["credentials"]["link_keys"]))
world = HorovodWorld(Invitation(**{**given, "server": tuple(given["server"])}))
tensor = torch.full((1000,), world.rank + 1.0)
wait([world.reduce(tensor, "proof")], "the proof's sum", 30)
assert tensor.eq(3.0).all(), tensor
world.close()
"""


def prove() -> None:
    """Sum a tensor in two processes. Raises `RunError`, with their output, if the sum is wrong or times out."""
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    port = server.start()
    members = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for rank, member in enumerate(members):
            # Not as an argument: every user of this machine can read those.
            assert member.stdin is not None
            member.stdin.write(json.dumps(asdict(_formation(server, rank, port))))
            member.stdin.close()
            member.stdin = None
        said = [member.communicate(timeout=PROOF_S)[0] for member in members]
    except subprocess.TimeoutExpired as error:
        raise RunError(f"two processes did not sum a tensor through Horovod within {PROOF_S:g} s") from error
    finally:
        for member in members:
            member.kill()
            member.wait()
        server.close()
    for member, text in zip(members, said, strict=True):
        if member.returncode:
            raise RunError(f"Horovod was built but does not work; output of a test process:\n{text.rstrip()}")


def _formation(server: RendezvousServer, rank: int, port: int) -> Invitation:
    return Invitation(
        generation=0,
        name="proof",
        rank=rank,
        size=2,
        address="127.0.0.1",
        server=("127.0.0.1", port),
        timeout_s=30,
        credentials=server.credentials(rank),
    )
