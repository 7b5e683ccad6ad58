"""A world on torch.distributed's Gloo, used by `collective: auto` if Horovod is not built.

Gloo accepts the first process that connects to a member's port as its peer, without any proof. So the members prove
their connections to each other once the world has formed. Over each connection both ends send a challenge, and answer
the other's challenge with the key that only these two know (`member_credentials`). A world with a forged connection is
not used: it raises `Interrupted`, and the group forms another.

This covers other processes on the members' machines, of any user: they can connect, but can neither read nor write a
connection of two others. It does not cover an attacker who can change packets on the network between machines.
"""

# torch has no complete annotations for its C++ exports.
# mypy: disable-error-code="attr-defined,name-defined,assignment,misc"

from __future__ import annotations

import contextlib
import hmac
import http.client
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.member_credentials import link_proof
from raytrain_plus.collective.world import FixedTransport, Operation, Transfer, Work
from raytrain_plus.errors import Interrupted
from raytrain_plus.torch_compat import gloo_options

CONNECT_S = 5.0
"""Limit, in seconds, of connecting to a member that has published its address."""
POLL_S = 0.01
"""Seconds between two requests for a key that another member has not yet published."""
REQUEST_TRIES = 3
"""Attempts of a request that the rendezvous cuts short because it came in too slowly."""
CHALLENGE_BYTES = 32
PROOF_S = 10.0
"""Limit, in seconds, of waiting for a member's challenge or proof.

The others may still connect, each in `CONNECT_S`.
"""
CLOSE_S = 0.1
"""Limit, in seconds, of waiting for a group to end; a stuck one ends by itself after its collectives' own limit."""


class TorchWorld(FixedTransport):
    """A Gloo process group of its own, never torch's default group."""

    def __init__(self, formation: Invitation) -> None:
        """Join the world. Raises `Interrupted` if a member does not join."""
        self.rank = formation.rank
        self.size = formation.size
        self._timeout = timedelta(seconds=formation.timeout_s)
        self._stores: list[_Store] = []
        try:
            # Waiting for an incoming connection cannot be interrupted.
            options = gloo_options(formation.address, min(CONNECT_S, formation.timeout_s))
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
        """Prove this member to every other member and check their proofs. Raises `RuntimeError` if one fails.

        A proof names its prover, so it cannot be sent back to the member that made it.
        """
        limit = timedelta(seconds=min(PROOF_S, self._timeout.total_seconds()))
        others = [rank for rank in range(self.size) if rank != self.rank]
        drawn = {rank: secrets.token_bytes(CHALLENGE_BYTES) for rank in others}
        challenges = self._exchange(drawn, limit)
        proofs = {rank: link_proof(keys[rank], self.rank, challenges[rank]) for rank in others}
        for rank, proof in self._exchange(proofs, limit).items():
            if not hmac.compare_digest(proof, link_proof(keys[rank], rank, drawn[rank])):
                raise RuntimeError(f"the process that connected as member {rank} did not prove that it is that member")

    def _exchange(self, given: Mapping[int, bytes], limit: timedelta) -> dict[int, bytes]:
        """Send each other member its bytes; return the bytes that each has sent, of the same length."""
        going = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in given.values()]
        coming = {rank: torch.empty(len(data), dtype=torch.uint8) for rank, data in given.items()}
        works = [self._group.recv([into], rank, 0) for rank, into in coming.items()]
        works += [self._group.send([data], rank, 0) for rank, data in zip(given, going, strict=True)]
        for work in works:
            work.wait(limit)
        return {rank: into.numpy().tobytes() for rank, into in coming.items()}

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Start an in-place all-reduce. Members submit in the same order; `name` is only for error messages."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        options.reduceOp = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        try:
            return _TorchWork(self._group.allreduce([tensor], options), name)
        except Exception as error:
            raise Interrupted(f"cannot start the all-reduce of {name}: {error}") from error

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`; as `reduce`."""
        options = AllgatherOptions()
        options.timeout = self._timeout
        try:
            parts = list(_bytes(into).chunk(self.size))
            return _TorchWork(self._group.allgather([parts], [_bytes(tensor)], options), name)
        except Exception as error:
            raise Interrupted(f"cannot start to gather {name}: {error}") from error

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`; as `reduce`."""
        options = AllToAllOptions()
        options.timeout = self._timeout
        try:
            return _TorchWork(self._group.alltoall_base(_bytes(into), _bytes(tensor), [], [], options), name)
        except Exception as error:
            raise Interrupted(f"cannot start to exchange {name}: {error}") from error

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`; as `reduce`. Gloo's own (torch 2.13) can be waited for, but not polled."""
        received = torch.empty_like(tensor)
        return _Summing(self.exchange(tensor, received, name), received.view(self.size, -1), into)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Start to send a contiguous tensor to another member; it must not change until it is sent."""
        try:
            return _TorchTransfer(self._group.send([tensor], to, tag), self._timeout)
        except Exception as error:
            raise Interrupted(f"cannot send to member {to}: {error}") from error

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Start to receive into a contiguous tensor what another member sends under the same tag."""
        try:
            return _TorchTransfer(self._group.recv([tensor], source, tag), self._timeout)
        except Exception as error:
            raise Interrupted(f"cannot receive from member {source}: {error}") from error

    def close(self) -> None:
        """Drop the group and its sockets.

        Dropping joins the group's threads. Gloo does not tell a send that waits for room in a socket that the socket
        broke, so such a thread waits until its limit. It blocks nothing else: it holds the tensors that it sends, and
        nothing reaches it any more.
        """
        last = [self._group]
        del self._group
        thread = threading.Thread(target=_drop, args=(last, self._stores), name="leaving a world", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's bytes, which Gloo moves whatever they mean."""
    return tensor.view(-1).view(torch.uint8)


def _drop(last: list[dist.ProcessGroupGloo], stores: list[_Store]) -> None:
    last.clear()
    stores.clear()


class _Store(dist.Store):
    """Publishes and finds the members' addresses at our rendezvous: keys end in `/<rank>`."""

    def __init__(self, formation: Invitation, kept: list[_Store]) -> None:
        super().__init__()
        self._formation = formation
        self._timeout_s = formation.timeout_s
        self._kept = kept
        # torch holds only the C++ part: without this the Python part would be freed, and its methods with it.
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
                raise RuntimeError(f"the rendezvous refused {key}: this member's token is for another world")
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
        raise AssertionError("the last attempt returns or raises")


class _TorchWork:
    def __init__(self, work: dist.Work, name: str) -> None:
        self._work = work
        self._name = name

    def ended(self, within_s: float) -> bool:
        # torch counts in milliseconds, and takes none for a wait without a limit.
        if within_s >= 0.001 and not self._work.is_completed():
            # It raises an error if the time is over, and that of an operation that failed, which `finish` raises again.
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(seconds=within_s))
        return bool(self._work.is_completed())

    def finish(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            raise Interrupted(f"the collective of {self._name} failed: {error}") from error


class _Summing:
    """An exchange of parts under way that are then summed."""

    def __init__(self, exchange: Work, parts: torch.Tensor, into: torch.Tensor) -> None:
        self._exchange = exchange
        self._parts = parts
        self._into = into

    def ended(self, within_s: float) -> bool:
        return self._exchange.ended(within_s)

    def finish(self) -> None:
        self._exchange.finish()
        torch.sum(self._parts, 0, out=self._into.view(-1))


class _TorchTransfer:
    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._work = work
        self._limit = limit

    def finish(self, what: str) -> None:
        # It cannot be polled: Gloo reports the end of a transfer only to a thread that waits for it. Shutting down the
        # world's sockets wakes a thread that must leave.
        try:
            self._work.wait(self._limit)
        except Exception as error:
            raise Interrupted(f"stopped waiting for {what}: {error}") from error
