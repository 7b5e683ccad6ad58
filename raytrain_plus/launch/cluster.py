"""The Ray cluster that a run is on: found or started, what it has room for, and the controllers that live there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.client import ray as client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_plus.controller.actor import Controller
from raytrain_plus.controller.order import Order
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.machine_check import check_seen, look, needs_of
from raytrain_plus.launch.ray_address import check_cluster, is_join, not_let_in
from raytrain_plus.launch.reaper import reaper
from raytrain_plus.membership.group import Limits
from raytrain_plus.membership.mesh import useful_shape
from raytrain_plus.membership.sizes import room_for
from raytrain_plus.parallel.sizing import largest
from raytrain_plus.ray_compat import (
    check_let_in,
    draining_nodes,
    end_our_own_ray,
    has_autoscaler,
    hide_token,
    most_there_can_be,
    our_own_signals,
    settings_of_our_own_ray,
    show_token,
    show_token_if_any,
    silent_about_deaths,
    socket_of_our_own_ray,
    without_its_gcs,
)
from raytrain_plus.storage.address import split
from raytrain_plus.storage.open import open_folder
from raytrain_plus.storage.probe import left
from raytrain_plus.storage.size_text import size_text

NAMESPACE = "raytrain_plus"
"""Where the controllers of a cluster have their names: the run's name, a slash, and what tells one from the others."""
ANSWER_S = 2.0
"""A controller that does not answer within so many seconds is none that lives."""
CALLS = 32
"""Calls that a controller answers at the same time: of its workers, and of those that follow it."""
LOOK_S = 60.0
"""Limit of what a machine sees: its first process may have to be started, and the code to be brought there."""
KNOCK_S = 5.0
"""Limit of finding out whether anybody listens at a cluster's address."""
SENT = "have the job sent there: raytrain submit JOB --address http://HOST:8265"
"""What is left to who is no machine of the cluster."""


@contextlib.contextmanager
def connected(job: Job, address: str | None) -> Iterator[float]:
    """A Ray to run on; yields the moment at which it was there. One that we start ends with the run."""
    if ray.is_initialized():
        _check_no_client()
        _warn_of_an_open_cluster()
        with _ray_errors_told():
            yield time.time()
        return
    address = address or os.environ.get("RAY_ADDRESS")
    with _others_ray(address) if address else _our_own_ray(job), silent_about_deaths(), _ray_errors_told():
        yield time.time()


@contextlib.contextmanager
def _others_ray(address: str) -> Iterator[None]:
    """Join the cluster at an address, while this is open."""
    chosen = "RAY_AUTH_MODE" in os.environ
    try:
        with _answering(address, "check the address, or leave it out to start Ray on this machine"):
            _join(address, f"or {SENT}")
        _warn_of_an_open_cluster()
        yield
    finally:
        ray.shutdown()
        if not chosen:
            hide_token()


@contextlib.contextmanager
def _our_own_ray(job: Job) -> Iterator[None]:
    """Start a Ray for this run alone; nothing of it outlives this, nor this process, whoever ends it."""
    before = set(psutil.Process().children())
    with reaper() as over_it:
        try:
            with _answering("local", "see Ray's own message"), _starting():
                ray.init(
                    address="local",
                    num_cpus=max(1, math.ceil((largest(job) + job.workers.spares) * job.workers.cpus)),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _system_config=settings_of_our_own_ray(),
                )
        finally:
            # Those of a start that failed, too.
            over_it.mind(_rays_own(set(psutil.Process().children()) - before), socket_of_our_own_ray())
        try:
            yield
        finally:
            end_our_own_ray()


def _rays_own(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run programs of Ray's package."""
    package = str(Path(ray.__file__).parent)
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(word.startswith(package) for word in process.cmdline()):
                found.append(process)
    return found


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Raise `RunError` if Ray does not start here in time; the machine is busy, most often, and nothing is wrong."""
    try:
        yield
    except AuthenticationError:
        raise
    except Exception as error:
        if isinstance(error, (OSError, ValueError)) and not isinstance(error, TimeoutError):
            # A folder that cannot be written, say: time does not mend it.
            raise
        # Ray raises a plain `Exception` after half a minute.
        raise RunError(
            f"Ray did not start on this machine: {_first_line(error)}\n  {_load()}\n"
            "  fix: try again when the machine is less busy, or join a cluster (--address)"
        ) from error


@contextlib.contextmanager
def _ray_errors_told() -> Iterator[None]:
    """Raise `RunError` for what goes wrong in Ray itself; most often something is too slow, or its head is gone."""
    try:
        yield
    except RayError as error:
        raise RunError(f"Ray failed: {type(error).__name__}: {_first_line(error)}\n  {_load()}") from error


def _load() -> str:
    """Say how busy this machine is."""
    memory, (load, _, _) = psutil.virtual_memory(), os.getloadavg()
    room = f"{size_text(memory.available)} of {size_text(memory.total)} memory free"
    return f"this machine now: load average {load:.1f} on {os.cpu_count()} cores, {room}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def joined(address: str, *, token: bool) -> Iterator[None]:
    """The cluster at an address, for a short talk with who is there. Raises `InputError` where none answers.

    `token`: whether it asks for one; Ray's own is shown to it then, unless RAY_AUTH_MODE says otherwise.
    """
    seen = "go to a machine that sees the cluster, and has its token where it asks for one"
    with _answering(address, f"{seen}; or name another of its addresses with --address"):
        if token:
            show_token()
        _join(address, "or have the same command run there, by ray job submit")
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _answering(address: str, remedy: str) -> Iterator[None]:
    """While a Ray is begun or joined: signals stay ours, and that none answers is raised as `InputError`."""
    check_cluster(address)
    try:
        with our_own_signals():
            yield
    except AuthenticationError as error:
        raise not_let_in(address, error.message) from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        why = str(error)
        if why.startswith("Version mismatch"):
            raise InputError(
                " ".join(why.split()),
                where=f"address: {address}",
                remedy="install here the Ray and the Python that the cluster has",
            ) from None
        raise InputError(
            f"no Ray cluster answers: {why.splitlines()[0]}", where=f"address: {address}", remedy=remedy
        ) from error


def _join(address: str, elsewhere: str) -> None:
    if not is_join(address):
        raise InputError(
            "a cluster is joined from one of its machines, and this is the address for those who are none",
            where=f"address: {address}",
            expected="the address of the cluster's head, HOST:6379, from a machine of the cluster",
            remedy=elsewhere,
        )
    try:
        _knock(address)
    except AuthenticationError:
        if not show_token_if_any():
            raise
        _knock(address)
    with without_its_gcs():
        ray.init(address=address, logging_level=logging.WARNING)


def _check_no_client() -> None:
    """Raises `InputError` where this process is connected as one that is no machine of the cluster."""
    if client.is_connected():
        raise InputError(
            "it goes through Ray Client (ray://), and a run begins on a machine of the cluster",
            where="the connection to Ray that is already there",
            expected="a connection from a machine of the cluster: ray.init(address='HOST:6379')",
            remedy=f"disconnect (ray.shutdown()), and go to such a machine, or {SENT}",
        )


def _warn_of_an_open_cluster() -> None:
    """Says that anybody may have the cluster that we are connected to run what they like, where it asks for no token
    and is not this machine's alone."""
    # One that asks for a token does not let in who shows none.
    if os.environ.get("RAY_AUTH_MODE") != "token":
        seen = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        beyond = sorted(one for one in seen if not one.startswith(("127.", "::1", "localhost")))
        if beyond:
            print(
                f"warning: the cluster asks for no token: whoever reaches {beyond[0]} can run anything on it "
                "(ray get-auth-token --generate, and start it again)",
                file=sys.stderr,
            )


def begin(order: Order, began: float, *, detached: bool) -> tuple[Any, Any]:
    """Starts the controller of a run on this node: its actor, and the reference of its end.

    `began`: Unix seconds at which Ray was there. If `detached` it outlives this process, and ends by itself. Raises
    `InputError` where the cluster cannot have what the job asks for, or has a run of this name.
    """
    job = order.plan.job
    limits = limits_of(job, order.plan.steps, order.cuts)
    for other in controllers_of(job.name):
        with contextlib.suppress(GetTimeoutError, RayError):
            folder = ray.get(other.folder.remote(), timeout=ANSWER_S)
            if folder is not None:
                raise InputError(
                    f"a run of this name is going on on this cluster (in {folder})",
                    where=f"name: {job.name}",
                    remedy=f"stop it (raytrain stop '{folder}'), or give this one another name (--set name=...)",
                )
    here = ray.get_runtime_context().get_node_id()
    _ask_machines(order, here)
    controller: Any = (
        ray.remote(Controller)
        .options(
            name=f"{job.name}/{secrets.token_hex(4)}",
            namespace=NAMESPACE,
            lifetime="detached" if detached else None,
            num_cpus=0,
            max_concurrency=CALLS,
            # As in `workers.pool`: Ray's head needs no record of each report.
            enable_task_events=False,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(order, limits, began)
    )
    try:
        return controller, controller.run.remote(detached)
    except BaseException:
        # Nobody else would end one that is detached.
        ray.kill(controller)
        raise


def _ask_machines(order: Order, here: str) -> None:
    """Asks each machine that has room for a worker what it sees of what the run needs; `here` is this one's node.

    Raises `InputError` where one lacks something. One that does not answer in time is told of: what it lacks its worker
    will say.
    """
    need = {"CPU": order.plan.job.workers.cpus, "GPU": order.plan.job.workers.gpus}
    leaving = draining_nodes() or {}
    machines = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving and room_for([node["Resources"]], need)
    }
    if not machines.keys() - {here}:
        return
    asked: dict[Any, str] = {}
    with left(open_folder(split(order.plan.folder)[0]), secrets.token_hex(4)) as probe:
        needs = needs_of(order, probe)
        asking: Any = ray.remote(look)
        for node, name in machines.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[asking.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs)] = name
        # None is ever cancelled: Ray ends a process that cancels a task which ends just then (2.60; "Tried to complete
        # task that was not pending").
        answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=LOOK_S)
        for ref in answered:
            try:
                seen = ray.get(ref)
            except (RayTaskError, RuntimeEnvSetupError) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise InputError(
                    f"the machine {asked[ref]} cannot take part: {(lines or [type(error).__name__])[-1]}",
                    where="the cluster",
                    remedy="install there what is installed here (raytrain doctor lists it)",
                ) from None
            except RayError:
                # It has gone meanwhile.
                continue
            check_seen(order, asked[ref], seen)
    for ref in silent:
        print(f"warning: {asked[ref]} did not say within {LOOK_S:g} s what it sees there", file=sys.stderr)


def controllers_of(run: str) -> list[Any]:
    """The controllers of runs of this name on the cluster; one that has just died may be among them."""
    found = []
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].rpartition("/")[0] == run:
            # It may have gone meanwhile.
            with contextlib.suppress(ValueError):
                found.append(ray.get_actor(one["name"], namespace=NAMESPACE))
    return found


def _knock(address: str) -> None:
    """Raises `OSError` where nobody listens at `host:port`, for whom Ray itself would try for minutes, and
    `AuthenticationError` where we are not let in."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
        check_let_in(address)


def limits_of(job: Job, steps: int, cuts: tuple[int, ...]) -> Limits:
    """What the group's machine goes by. Raises `InputError` where the cluster can never have
    `workers.min` and `workers.spares`."""
    need = {"CPU": job.workers.cpus, "GPU": job.workers.gpus}
    shards = job.data.shards
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(nodes, need)
    minimum, maximum, spares = max(job.workers.min, cuts[-1]), job.workers.max or job.workers.min, job.workers.spares
    most = most_there_can_be()
    wanted = minimum + spares
    if most is None:
        # Where nobody knows how far it grows, elastic.wait_s is the limit.
        grows = room < wanted and has_autoscaler()
    else:
        grows = all(most.get(name, 0.0) >= amount * wanted for name, amount in need.items())
    if room < wanted and not grows:
        has = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in nodes)
        raise InputError(
            f"the cluster has room for {room} workers of {need['CPU']:g} CPU and {need['GPU']:g} GPU each",
            where=f"workers.min: {minimum}" if room < minimum else f"workers.spares: {spares}",
            expected=f"room for {wanted}, now or by an autoscaler; its {len(nodes)} nodes have: {has}",
            remedy="lower workers.min, workers.spares or what a worker needs, or add nodes",
        )
    shape = useful_shape(max(room - spares, minimum), minimum, maximum, shards, cuts)
    return Limits(
        minimum=minimum,
        maximum=maximum,
        spares=spares,
        shards=shards,
        steps=steps,
        max_failures=job.elastic.max_failures,
        expected=min(max(room, minimum), spares + (minimum if shape is None else shape.size)),
        cuts=cuts,
    )
