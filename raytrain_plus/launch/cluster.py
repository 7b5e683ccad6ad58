"""Join or start the Ray cluster of a run, check its capacity, and start or find controllers on it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import psutil
import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.client import ray as client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_plus.controller.controller_actor import Controller
from raytrain_plus.controller.run_order import Driver, RunOrder
from raytrain_plus.errors import InputError, RunError, first_line
from raytrain_plus.install.ray_folder import ray_folder
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.machine_check import check_machine, check_seen, needs_of
from raytrain_plus.launch.ray_address import authentication_failed, check_cluster, is_join
from raytrain_plus.launch.reaper import reaper
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.sizes import SizeTable, room_for
from raytrain_plus.parallel.sizing import most_workers
from raytrain_plus.ray_compat import (
    accelerator_resource,
    check_let_in,
    draining_nodes,
    end_our_own_ray,
    has_autoscaler,
    hide_token,
    most_there_can_be,
    our_own_signals,
    outliving_this_process,
    plain_outside_terminals,
    settings_of_our_own_ray,
    show_token,
    show_token_if_any,
    silent_about_deaths,
    socket_of_our_own_ray,
    started_here,
    starts_again,
    without_its_gcs,
)
from raytrain_plus.runs.process import this_process
from raytrain_plus.storage.address import split
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.probe import leave_probe
from raytrain_plus.storage.size_text import size_text
from raytrain_plus.workers.run_actors import NAMESPACE, actors_of, clear, leave

ANSWER_S = 2.0
"""Maximum seconds for a controller's answer; one that takes longer counts as dead."""
TAKE_OVER_S = 30.0
"""Maximum seconds for an answer of a controller that Ray starts again."""
CALLS = 32
"""Calls that a controller serves concurrently, from its workers and its followers."""
PIECE_BYTES = 80_000
"""Maximum size of a pickled piece of an order: Ray keeps an argument with the call up to 100 kB."""
LOOK_S = 60.0
"""Maximum seconds for the check of a machine: its first process may have to start and receive the code."""
KNOCK_S = 5.0
"""Maximum seconds to find out whether anything listens at a cluster's address."""
SENT = "submit the job to the cluster: raytrain submit JOB --address http://HOST:8265"
"""The remedy for a machine that is not part of the cluster."""


@contextlib.contextmanager
def connected(job: Job, address: str | None) -> Iterator[float]:
    """Connect to Ray and yield the Unix seconds at which it was ready. A Ray that this starts ends with the run."""
    if ray.is_initialized():
        _check_no_client()
        _warn_of_an_open_cluster()
        with _as_run_error():
            yield time.time()
        return
    address = address or os.environ.get("RAY_ADDRESS")
    ours = _others_ray(address) if address else _our_own_ray(job)
    with plain_outside_terminals(), ours, silent_about_deaths(), _as_run_error():
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
    """Start a Ray for this run only; none of its processes outlives this context or this process, however it ends."""
    before = set(psutil.Process().children())
    with reaper() as over_it:
        try:
            try:
                _start_ray(job)
            except RunError as error:
                # Most often the machine was only busy.
                print(f"{first_line(error)}; trying once more", file=sys.stderr)
                _end_a_start(set(psutil.Process().children()) - before)
                _start_ray(job)
        finally:
            # Includes the processes of a start that failed.
            over_it.mind(_rays_own(set(psutil.Process().children()) - before), socket_of_our_own_ray())
        try:
            yield
        finally:
            end_our_own_ray()


def _start_ray(job: Job) -> None:
    with (
        _answering("local", "see Ray's own message; RAY_TMPDIR names another folder for its files"),
        _starting(),
        outliving_this_process(),
    ):
        ray.init(
            address="local",
            num_cpus=max(1, math.ceil((most_workers(job) + job.workers.spares) * job.workers.cpus)),
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=ray_folder(),
            _system_config=settings_of_our_own_ray(),
        )


def _end_a_start(processes: set[psutil.Process]) -> None:
    """End what a start of Ray has left that failed."""
    ray.shutdown()
    left = _rays_own(processes)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=KNOCK_S)


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
    """Raise `RunError` if Ray does not start here in time; most often the machine is only busy."""
    try:
        yield
    except AuthenticationError:
        raise
    except Exception as error:
        if isinstance(error, (OSError, ValueError)) and not isinstance(error, TimeoutError):
            # For example a folder that cannot be written: a retry would not help.
            raise
        # Ray raises a plain `Exception` after half a minute.
        raise RunError(
            f"Ray did not start on this machine: {first_line(error)}\n  {_load()}\n"
            "  fix: try again when the machine is less busy, or join a cluster (--address)"
        ) from error


@contextlib.contextmanager
def _as_run_error() -> Iterator[None]:
    """Turn Ray's own errors into `RunError`; most often something is too slow, or the head node is gone."""
    try:
        yield
    except RayError as error:
        raise RunError(f"Ray failed: {type(error).__name__}: {first_line(error)}\n  {_load()}") from error


def _load() -> str:
    """Return this machine's load and free memory, in words."""
    memory, (load, _, _) = psutil.virtual_memory(), os.getloadavg()
    room = f"{size_text(memory.available)} of {size_text(memory.total)} memory free"
    return f"this machine now: load average {load:.1f} on {os.cpu_count()} cores, {room}"


@contextlib.contextmanager
def joined(address: str, *, token: bool) -> Iterator[None]:
    """Join the cluster at an address for a short exchange with its actors.

    `token`: whether the cluster requires one; Ray's stored token is then sent, unless RAY_AUTH_MODE says otherwise.
    Raises `InputError` if no cluster answers.
    """
    seen = "use a machine that can reach the cluster and, if the cluster requires one, has its token"
    with _answering(address, f"{seen}; or name another of its addresses with --address"):
        if token:
            show_token()
        _join(address, "or run the same command there with ray job submit")
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _answering(address: str, remedy: str) -> Iterator[None]:
    """Keep our signal handlers while Ray is started or joined; raise `InputError` if it does not answer."""
    check_cluster(address)
    try:
        with our_own_signals():
            yield
    except AuthenticationError as error:
        raise authentication_failed(address, error.message) from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        why = str(error)
        if why.startswith("Version mismatch"):
            raise InputError(
                " ".join(why.split()),
                where=f"address: {address}",
                remedy="install the cluster's versions of Ray and Python here",
            ) from None
        raise InputError(
            f"no Ray cluster answers: {first_line(error)}", where=f"address: {address}", remedy=remedy
        ) from error


def _join(address: str, elsewhere: str) -> None:
    if not is_join(address):
        raise InputError(
            "this is an address for machines outside the cluster; only a machine of the cluster can join it",
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
    """Raise `InputError` if this process is connected through Ray Client, from outside the cluster."""
    if client.is_connected():
        raise InputError(
            "a run cannot start through Ray Client (ray://); it must start on a machine of the cluster",
            where="the existing connection to Ray",
            expected="a connection from a machine of the cluster: ray.init(address='HOST:6379')",
            remedy=f"disconnect (ray.shutdown()) and start the run on a machine of the cluster, or {SENT}",
        )


def _warn_of_an_open_cluster() -> None:
    """Warn if the connected cluster spans other machines and requires no token: anyone can run code on it."""
    # A cluster that requires a token would have refused us without one.
    if os.environ.get("RAY_AUTH_MODE") != "token":
        seen = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        if len(seen) == 1 and started_here():
            # Its node has this machine's address, but nobody has set up a cluster.
            return
        beyond = sorted(one for one in seen if not one.startswith(("127.", "::1", "localhost")))
        if beyond:
            print(
                f"warning: the cluster requires no token: anyone who can reach {beyond[0]} can run any code on it "
                "(fix: ray get-auth-token --generate, then restart the cluster)",
                file=sys.stderr,
            )


class Begun(NamedTuple):
    """A controller that has been started."""

    name: str
    """Of its actor."""
    actor: Any
    closing: Any
    """The reference that is ready when it ends."""

    def clear(self) -> None:
        """End the run's workers at once."""
        clear(self.name)

    def leave(self) -> None:
        """End the run's workers once they have written what they leave: the controller is gone for good."""
        with contextlib.suppress(RayError):
            leave(actors_of(self.name).values())
        clear(self.name)


def begin(order: RunOrder, began: float, *, detached: bool) -> Begun:
    """Start the controller of a run on this node.

    `began`: Unix seconds at which Ray was ready. If `detached`, the controller outlives this process and ends by
    itself. Otherwise it ends with this process, except that it completes a stop that was requested before. Raises
    `InputError` if the cluster cannot provide what the job asks for, or already has a run of this name.
    """
    job = order.plan.job
    limits = limits_of(job, order.plan.steps, order.sizes)
    for other in controllers_of(job.name):
        with contextlib.suppress(GetTimeoutError, RayError):
            # One that Ray starts again answers once it has taken the run over.
            limit_s = TAKE_OVER_S if starts_again(other) else ANSWER_S
            folder = ray.get(other.folder.remote(), timeout=limit_s)
            if folder is not None:
                raise InputError(
                    f"a run with this name is already running on this cluster (in {folder})",
                    where=f"name: {job.name}",
                    remedy=f"stop it (raytrain stop '{folder}'), or choose another name (--set name=...)",
                )
    here = ray.get_runtime_context().get_node_id()
    _ask_machines(order, here)
    driver = None if detached else Driver(os.getpid(), this_process())
    name = f"{job.name}/{secrets.token_hex(4)}"
    controller: Any = (
        ray.remote(Controller)
        .options(
            name=name,
            namespace=NAMESPACE,
            # Ray would end it with its driver, even while it saves the state of a stopped run.
            lifetime="detached" if detached or (driver and driver.identity) else None,
            # Its workers train on meanwhile: see `controller.succession`.
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            max_concurrency=CALLS,
            # As in `workers.pool`: Ray's head need not record each report.
            enable_task_events=False,
            # On another node if this one is gone.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        )
        .remote(limits, began, driver, detached, *pieces_of(order))
    )
    try:
        return Begun(name, controller, controller.run.remote())
    except BaseException:
        # Nothing else would end a detached controller.
        ray.kill(controller)
        raise


def pieces_of(order: RunOrder) -> list[bytes]:
    """Return an order as pickled pieces: Ray keeps arguments of this size with an actor, up to 10 MB of them in all.

    Larger ones lie in the driver's memory, and without the driver Ray could not start the actor again.
    """
    pickled = cloudpickle.dumps(order)
    return [pickled[start : start + PIECE_BYTES] for start in range(0, len(pickled), PIECE_BYTES)]


def _ask_machines(order: RunOrder, here: str) -> None:
    """Check that each machine with room for a worker sees what the run needs; `here` is this machine's node id.

    Raises `InputError` if a machine lacks something. Warns about a machine that does not answer in time: its worker
    will report what it lacks.
    """
    need = _need(order.plan.job)
    leaving = draining_nodes() or {}
    machines = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving and room_for([node["Resources"]], need)
    }
    if not machines.keys() - {here}:
        return
    asked: dict[Any, str] = {}
    with leave_probe(open_folder(split(order.plan.folder)[0]), secrets.token_hex(4)) as probe:
        needs = needs_of(order, probe)
        asking: Any = ray.remote(check_machine)
        for node, name in machines.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[asking.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs)] = name
        # Never cancel these tasks: Ray 2.60 ends a process that cancels a task at the moment it ends ("Tried to
        # complete task that was not pending").
        answered, unanswered = ray.wait([*asked], num_returns=len(asked), timeout=LOOK_S)
        for ref in answered:
            try:
                seen = ray.get(ref)
            except (RayTaskError, RuntimeEnvSetupError) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise InputError(
                    f"the machine {asked[ref]} cannot take part: {(lines or [type(error).__name__])[-1]}",
                    where="the cluster",
                    remedy="install the same packages there as here (raytrain doctor lists them)",
                ) from None
            except RayError:
                # The machine has left in the meantime.
                continue
            check_seen(order, asked[ref], seen)
    for ref in unanswered:
        print(f"warning: the check of the machine {asked[ref]} did not finish within {LOOK_S:g} s", file=sys.stderr)


def controllers_of(run: str) -> list[Any]:
    """Return the controllers of runs of this name on the cluster; one that has just died may be among them."""
    found = []
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].rpartition("/")[0] == run:
            # The actor may have ended in the meantime.
            with contextlib.suppress(ValueError):
                found.append(ray.get_actor(one["name"], namespace=NAMESPACE))
    return found


def _knock(address: str) -> None:
    """Raise `OSError` if nothing listens at `host:port`, and `AuthenticationError` if authentication fails.

    Ray itself would retry an address where nothing listens for minutes.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
        check_let_in(address)


def _need(job: Job) -> dict[str, float]:
    """Return the resources that each worker needs."""
    workers = job.workers
    return {"CPU": workers.cpus, "GPU": workers.gpus, **accelerator_resource(workers.accelerator)}


def _spelled(node: Mapping[str, float]) -> str:
    """Return the resources of a node in words."""
    kinds = [name.partition(":")[2] for name in node if name.startswith("accelerator_type:")]
    return ", ".join([f"{node.get('CPU', 0):g} CPU", f"{node.get('GPU', 0):g} GPU", *kinds])


def limits_of(job: Job, steps: int, sizes: SizeTable) -> Limits:
    """Return the limits that the group's state machine applies.

    Raises `InputError` if the cluster can never have room for `workers.min` and `workers.spares`.
    """
    need = _need(job)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(nodes, need)
    minimum, spares = sizes.fewest, job.workers.spares
    most = most_there_can_be()
    wanted = minimum + spares
    if most is None:
        # If it is not known how far the cluster can grow, `elastic.wait_s` bounds the wait.
        grows = room < wanted and has_autoscaler()
    else:
        grows = all(most.get(name, 0.0) >= need[name] * wanted for name in ("CPU", "GPU"))
    if room < wanted and not grows:
        has = "; ".join(map(_spelled, nodes))
        kind = "" if job.workers.accelerator is None else f", on nodes with {job.workers.accelerator}"
        raise InputError(
            f"the cluster has room for {room} workers of {need['CPU']:g} CPU and {need['GPU']:g} GPU each{kind}",
            where=f"workers.min: {minimum}" if room < minimum else f"workers.spares: {spares}",
            expected=f"room for {wanted}, now or after autoscaling; its {len(nodes)} nodes have: {has}",
            remedy="lower workers.min, workers.spares or the resources of a worker, or add nodes",
        )
    shape = sizes.shape(max(room - spares, minimum))
    return Limits(
        sizes=sizes,
        spares=spares,
        steps=steps,
        max_failures=job.elastic.max_failures,
        holders=job.parallel.holders,
        by_layer=job.parallel.sharded == "full",
        expected=min(max(room, minimum), spares + (minimum if shape is None else shape.size)),
    )
