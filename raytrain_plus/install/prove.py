"""Two processes sum a tensor through Horovod: the proof that a build works."""

from __future__ import annotations

import subprocess
import sys

from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.errors import RunError

PROOF_S = 120.0

_MEMBER = """
import sys, torch
from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.horovod import HorovodWorld
from raytrain_plus.collective.world import wait
rank, port = int(sys.argv[1]), int(sys.argv[2])
world = HorovodWorld(Formation(generation=0, name="proof", rank=rank, size=2, address="127.0.0.1",
                               server=("127.0.0.1", port), timeout_s=30))
tensor = torch.full((1000,), rank + 1.0)
wait(world.reduce(tensor, "proof"), "the proof's sum", 30)
assert tensor.eq(3.0).all(), tensor
world.close()
"""


def prove() -> None:
    """Raises `RunError`, with what the processes said, where the sum does not come out."""
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    port = server.start()
    members = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
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
            raise RunError(f"Horovod was built but does not work; a process that used it said:\n{text.rstrip()}")
