"""A world on torch.distributed's Gloo: what `collective: auto` takes where Horovod is not built.

Gloo takes the first process that connects to a member's port for its peer, and asks for no proof. So the members prove
their connections to each other as soon as the world has formed: over each connection both ends send a challenge, and
answer that of the other with the key that only these two know (`credentials`). A world with a forged connection is not
used: `Interrupted` says so, and the group forms another. What this covers: other processes of the members' machines,
whoever runs them, which can connect, but can neither read nor write a connection of two others. It does not cover who
can change packets on the network between machines.
"""

# torch ships no complete annotations for what its C++ side exports.
# mypy: disable-error-code="attr-defined,name-defined,assignment,misc"

from __future__ import annotations

import hmac
import http.client
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from raytrain_plus.collective.credentials import link_proof
from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.world import Operation, Transfer, Work
from raytrain_plus.errors import Interrupted

CONNECT_S = 5.0
"""Limit of connecting to a member that has published where it listens."""
POLL_S = 0.01
"""Seconds between two looks for a key that another member has yet to publish."""
REQUEST_TRIES = 3
"""How often a request is made that the rendezvous cuts short, because it came in too slowly, before it fails."""
CHALLENGE_BYTES = 32
PROOF_S = 10.0
"""Limit of waiting for a member's challenge or proof: the others may still connect, each within `CONNECT_S`."""
CLOSE_S = 0.1
"""Limit of waiting for a group to end; one that is stuck ends by itself, after its collectives' own limit."""


class TorchWorld:
    """A Gloo process group of its own, never torch's default one."""

    def __init__(self, formation: Formation) -> None:
        """Joins the world. Raises `Interrupted` where a member does not come."""
        self.rank = formation.rank
        self.size = formation.size
        self._timeout = timedelta(seconds=formation.timeout_s)
        self._stores: list[_Store] = []
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=formation.address)]
            # Who waits to be connected to cannot be interrupted.
            options._timeout = timedelta(seconds=min(CONNECT_S, formation.timeout_s))
            store = _Store(formation, self._stores)
            self._group = dist.ProcessGroupGloo(store, formation.rank, formation.size, options)
            self._prove_links(formation.credentials.link_keys)
        except Exception as error:
            if hasattr(self, "_group"):
                self.close()
            raise Interrupted(
                f"world {formation.name} of generation {formation.generation} did not form: {error}"
            ) from error

    def _prove_links(self, keys: Sequence[str]) -> None:
        """Prove this member to each other one, and them to this one. Raises `RuntimeError` if one cannot.

        A proof names its prover, so that none can be sent back to who made it.
        """
        limit = timedelta(seconds=min(PROOF_S, self._timeout.total_seconds()))
        others = [rank for rank in range(self.size) if rank != self.rank]
        drawn = {rank: secrets.token_bytes(CHALLENGE_BYTES) for rank in others}
        challenges = self._exchange(drawn, limit)
        proofs = {rank: link_proof(keys[rank], self.rank, challenges[rank]) for rank in others}
        for rank, proof in self._exchange(proofs, limit).items():
            if not hmac.compare_digest(proof, link_proof(keys[rank], rank, drawn[rank])):
                raise RuntimeError(f"the process that connected as member {rank} is not that member")

    def _exchange(self, given: Mapping[int, bytes], limit: timedelta) -> dict[int, bytes]:
        """Send each other member its bytes, and return what each has sent, of the same length."""
        going = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in given.values()]
        coming = {rank: torch.empty(len(data), dtype=torch.uint8) for rank, data in given.items()}
        works = [self._group.recv([into], rank, 0) for rank, into in coming.items()]
        works += [self._group.send([data], rank, 0) for rank, data in zip(given, going, strict=True)]
        for work in works:
            work.wait(limit)
        return {rank: into.numpy().tobytes() for rank, into in coming.items()}

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Starts an in-place all-reduce. Members submit in the same order; `name` is for the reader."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        options.reduceOp = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        try:
            return _TorchWork(self._group.allreduce([tensor], options), name)
        except Exception as error:
            raise Interrupted(f"cannot start the all-reduce of {name}: {error}") from error

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Starts to send a contiguous tensor, which must not change until that is done, to another member."""
        try:
            return _TorchTransfer(self._group.send([tensor], to, tag), self._timeout)
        except Exception as error:
            raise Interrupted(f"cannot send to member {to}: {error}") from error

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Starts to receive what another member sends under the same tag into a contiguous tensor."""
        try:
            return _TorchTransfer(self._group.recv([tensor], source, tag), self._timeout)
        except Exception as error:
            raise Interrupted(f"cannot receive from member {source}: {error}") from error

    def close(self) -> None:
        """Drops the group and its sockets.

        Dropping joins the group's threads, and Gloo does not tell a send that waits for room in a socket that the
        socket broke: such a thread sits out its limit. It sits there alone; it holds the tensors that it sends, and
        nothing reaches it any more.
        """
        last = [self._group]
        del self._group
        thread = threading.Thread(target=_drop, args=(last, self._stores), name="leaving a world", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _drop(last: list[dist.ProcessGroupGloo], stores: list[_Store]) -> None:
    last.clear()
    stores.clear()


class _Store(dist.Store):
    """Publishes and finds the members' addresses at our rendezvous: keys end in `/<rank>`."""

    def __init__(self, formation: Formation, kept: list[_Store]) -> None:
        super().__init__()
        self._formation = formation
        self._timeout_s = formation.timeout_s
        self._kept = kept
        # torch holds the C++ part alone: without this the Python part would go, and its methods with it.
        kept.append(self)

    def clone(self) -> _Store:
        return _Store(self._formation, self._kept)

    def set(self, key: str, value: bytes | str) -> None:
        status, _ = self._ask("PUT", key, value.encode() if isinstance(value, str) else value)
        if status != 200:
            raise RuntimeError(f"the rendezvous refused {key}: status {status}")

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while True:
            status, value = self._ask("GET", key)
            if status == 200:
                return value
            if status == 403:
                raise RuntimeError(f"the rendezvous refused {key}: this member's token is not of this world")
            if status == 410:
                raise RuntimeError("the formation was cancelled")
            if status != 404:
                raise RuntimeError(f"the rendezvous refused {key}: status {status}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no member published {key} within {self._timeout_s:g} s")
            time.sleep(POLL_S)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        for tries in range(1, REQUEST_TRIES + 1):
            connection = http.client.HTTPConnection(*self._formation.server, timeout=self._timeout_s)
            try:
                token = self._formation.credentials.token
                connection.request(
                    method, f"/torch/{key.rpartition('/')[2]}", body, {"Authorization": f"Bearer {token}"}
                )
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (ConnectionError, http.client.HTTPException):
                if tries == REQUEST_TRIES:
                    raise
            finally:
                connection.close()
        raise AssertionError("the last try returns or raises")


class _TorchWork:
    def __init__(self, work: dist.Work, name: str) -> None:
        self._work = work
        self._name = name

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def finish(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            raise Interrupted(f"the all-reduce of {self._name} failed: {error}") from error


class _TorchTransfer:
    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._work = work
        self._limit = limit

    def finish(self, what: str) -> None:
        # It cannot be polled: Gloo says that a transfer is done to who waits for it, and no sooner. Who is to leave is
        # woken by the cut of the world's sockets.
        try:
            self._work.wait(self._limit)
        except Exception as error:
            raise Interrupted(f"left the wait for {what}: {error}") from error
