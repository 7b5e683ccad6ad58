"""The only module that uses Ray's private interfaces.

If a version of Ray lacks one, the function logs a warning and returns less: None, False or an empty value.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import ray

SEEN = "2.60"
"""The newest version of Ray with which this module was tested."""

DEATH = "A worker died or was killed while executing a task"
"""Start of the ten lines that Ray prints on the driver's terminal when a worker dies."""
REPEATED = "Task Controller."
"""Start of the line that Ray prints there when it repeats a call to an actor that it has started again."""
SILENCED = f"{re.escape(DEATH)}|{re.escape(REPEATED)}"

HEAD = "node:__internal_head__"
"""A resource that only a cluster's head node has."""

WATCHER_S = 10.0
"""Maximum seconds for a killed process to end."""

WITHOUT_GCS_S = 7 * 24 * 3600
"""Seconds for which a process survives without Ray's GCS: longer than any wait of this package."""

DRAIN_S = 10.0
"""Maximum seconds to report to Ray that a node is leaving."""

OF_LIBRARIES = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+:? [A-Z]\b"  # C++ of Ray and Horovod
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t[A-Z]+ \S+:\d+ -- "  # Ray's Python logger
    r"|\*\*\* SIG[A-Z]+ received at time=|(PC: )? *@ +0x[0-9a-f]+ "  # Ray's report of a fatal signal
)
"""Start of a line that a library writes in a worker's process, not the task."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")

T = TypeVar("T")


def draining_nodes() -> dict[str, float | None] | None:
    """Return the draining nodes: node id -> deadline in Unix seconds, or None if it has no deadline.

    Returns None if this Ray does not report them: a node's departure is then handled as a loss.
    """

    def ask() -> dict[str, float | None] | None:
        from ray._private.state import state

        return {node: ms / 1000 if ms else None for node, ms in state.get_draining_nodes().items()}

    return _or_nothing(ask, "a draining node is noticed only when it is gone")


def drain_node(address: str, node: str, why: str, deadline: float) -> bool | None:
    """Report to the Ray at `address` that a node will be preempted at `deadline`, in Unix seconds.

    Runs that follow `draining_nodes` then leave the node, and Ray schedules nothing more on it. Returns whether Ray
    accepted this; None if this Ray does not support it.
    """

    def tell() -> bool:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

        preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        # To Ray, 0 means no deadline, and a deadline in the past is invalid.
        deadline_ms = math.ceil(max(deadline, time.time() + 0.001) * 1000)
        taken, refusal = GcsClient(address).drain_node(node, preempted, why, deadline_ms, timeout=DRAIN_S)
        if not taken:
            logging.getLogger(__name__).warning("Ray refused to drain node %s: %s", node, refusal)
        return bool(taken)

    return _or_nothing(tell, "a draining node is noticed only when it is gone")


def drain_this_node(why: str, deadline: float) -> bool | None:
    """Drain the node of this process; do nothing if it already drains with the same or an earlier deadline."""
    context = ray.get_runtime_context()
    known = (draining_nodes() or {}).get(context.get_node_id())
    if known is not None and known <= deadline:
        return True
    return drain_node(context.gcs_address, context.get_node_id(), why, deadline)


def accelerator_resource(accelerator: str | None) -> dict[str, float]:
    """Return what to reserve so that Ray places a worker on a node with this accelerator type; nothing for None.

    Ray gives each node with such an accelerator 1 of a resource; its own option `accelerator_type` takes 0.001, too.
    """
    return {} if accelerator is None else {f"accelerator_type:{accelerator}": 0.001}


def most_there_can_be() -> dict[str, float] | None:
    """Return the maximum of each resource that the autoscaler may reach; None if unknown."""

    def ask() -> dict[str, float] | None:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
        return None if most is None else {name: float(amount) for name, amount in most.items()}

    return _or_nothing(ask, "before a run starts, the cluster counts as unable to grow")


def has_autoscaler() -> bool:
    """Return whether the cluster has an autoscaler v2, which `ray up` and KubeRay start.

    It may add resources; Ray does not report how much.
    """

    def ask() -> bool:
        from ray.autoscaler.v2.sdk import get_cluster_status

        # The number of its newest report; 0 if there was none yet.
        return (get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version or "0") != "0"

    return _or_nothing(ask, "before a run starts, the cluster counts as unable to grow") or False


def ray_data_on_the_head() -> None:
    """Start Ray Data's cluster-wide actors on the head node, unless they already exist.

    Ray Data itself would start them on the node that first uses it. They outlive the run, and an autoscaler never
    removes a node that has an actor, even one that takes no CPU.
    """

    def start() -> None:
        from ray.data._internal import stats
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator
        from ray.data._internal.usage import actor as usage

        head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
        if not head:
            return
        kept: dict[str, Any] = {
            "num_cpus": 0,
            "get_if_exists": True,
            "lifetime": "detached",
            "label_selector": {"ray.io/node-id": head[0]},
        }
        keeper: Any = stats._StatsActor
        keeper.options(name=stats.STATS_ACTOR_NAME, namespace=stats.STATS_ACTOR_NAMESPACE, **kept).remote()
        # Two threads must not create an actor of the same name at once; Ray Data uses these locks for that.
        with usage._get_or_create_lock:
            name = "DataUsageCollectionActor"
            ray.remote(usage._UsageCollectionActor).options(name=name, namespace=name, **kept).remote()
        with coordinator._get_or_create_lock:
            name = "AutoscalingCoordinator"
            again: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, **kept}
            ray.remote(coordinator._AutoscalingCoordinatorActor).options(name=name, namespace=name, **again).remote()

    _or_nothing(start, "an autoscaler cannot remove the node on which a run first used Ray Data")


def settings_of_our_own_ray() -> dict[str, Any]:
    """Return the internal settings of a Ray that is started for one run.

    They give its workers normal priority: by default Ray lets everything else on the machine run first. Empty for a Ray
    newer than `SEEN`: an unknown setting ends Ray.
    """
    newest = tuple(int(part) for part in ray.__version__.split(".")[:2])
    known = newest <= tuple(int(part) for part in SEEN.split("."))
    return {"worker_niceness": 0, "gcs_rpc_server_reconnect_timeout_s": WITHOUT_GCS_S} if known else {}


@contextlib.contextmanager
def without_its_gcs() -> Iterator[None]:
    """Let a connection to Ray that is made in this context survive the cluster's GCS.

    By default Ray ends the process after a minute without a GCS. A limit that the user has set is kept.
    """
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(WITHOUT_GCS_S)
    try:
        yield
    finally:
        del os.environ[name]


def show_token() -> None:
    """Make Ray send its stored token to the cluster that is joined next, unless RAY_AUTH_MODE says otherwise.

    By default Ray does so only for a cluster that it finds on this machine. Use this only if the cluster requires a
    token: otherwise it calls this process without one, and this process then refuses the call.
    """

    def show() -> None:
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        if "RAY_AUTH_MODE" not in os.environ:
            _enable_token_auth()

    _or_nothing(show, "a cluster that requires a token needs RAY_AUTH_MODE=token in the environment")


def show_token_if_any() -> bool:
    """Make Ray's clients send the stored token, if there is one and RAY_AUTH_MODE is not set; return whether they do.

    Do not use this with actors on a cluster that requires no token: they could no longer be called.
    """

    def show() -> bool:
        from ray._private.authentication.authentication_token_setup import _enable_token_auth
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        if "RAY_AUTH_MODE" in os.environ or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            return False
        _enable_token_auth()
        return True

    return bool(_or_nothing(show, "a cluster that requires a token needs RAY_AUTH_MODE=token in the environment"))


def hide_token() -> None:
    """Make Ray's clients send no token to clusters that this process joins later, until `show_token` is called."""

    def hide() -> None:
        from ray._raylet import Config  # type: ignore[attr-defined]

        os.environ.pop("RAY_AUTH_MODE", None)
        # Ray caches what it has read from the environment.
        Config.initialize("")

    _or_nothing(hide, "a cluster that requires no token needs RAY_AUTH_MODE=disabled in the environment")


def check_let_in(address: str) -> None:
    """Raise Ray's `AuthenticationError` if the cluster at `host:port` requires a token and gets none or a wrong one.

    `ray.init` would retry for 20 s and then report that no cluster answers. Raises `RpcError` after 40 s if none
    answers.
    """

    def ask() -> None:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        # Otherwise `GcsClient` ends the process if a token must be sent and there is none.
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=address)

    _or_nothing(ask, "a failed authentication is reported as a cluster that does not answer")


def is_submitted() -> bool:
    """Return whether this process is the driver of a job that was submitted to a cluster."""

    def ask() -> bool:
        from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

        return "job_submission_id" in os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "")

    return bool(_or_nothing(ask, "a submitted run ends when its driver does"))


def socket_of_our_own_ray() -> str:
    """Return the raylet socket of the local Ray of one run; empty if that did not start.

    The command of each of its workers names this socket.
    """

    def ask() -> str:
        from ray._private import worker

        node = worker._global_node
        return "" if node is None else str(node.raylet_socket_name or "")

    return _or_nothing(ask, "a worker that is just starting outlives a killed driver") or ""


def started_here() -> bool:
    """Return whether this process has started the Ray that it is connected to."""

    def ask() -> bool:
        from ray._private import worker

        node = worker._global_node
        return node is not None and bool(node.is_head())

    return _or_nothing(ask, "a local Ray is taken for a cluster, and a warning about tokens is printed") or False


def end_our_own_ray() -> None:
    """End the local Ray of one run.

    The monitor process of its (absent) autoscaler is killed first: it ignores the request to end, and Ray would wait a
    second for it.
    """

    def watcher() -> Any:
        from ray._private import worker

        node = worker._global_node
        return [] if node is None else [info.process for info in node.all_processes.get("monitor", [])]

    try:
        for process in _or_nothing(watcher, "Ray takes a second longer to end") or []:
            process.kill()
            process.wait(timeout=WATCHER_S)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def our_own_signals() -> Iterator[None]:
    """Keep Ray from replacing the SIGTERM handler in this context.

    Ray's handler raises an exception. In a callback of the interpreter or of the logging module the exception is lost,
    and the signal with it.
    """

    def theirs() -> Any:
        from ray._private import utils

        return utils, utils.set_sigterm_handler

    found = _or_nothing(theirs, "a SIGTERM that comes while Ray starts may be lost")
    if found is not None:
        found[0].set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if found is not None:
            found[0].set_sigterm_handler = found[1]


@contextlib.contextmanager
def outliving_this_process() -> Iterator[None]:
    """Start Ray's processes in this context without the kernel's order to kill them when this process ends.

    A stopped run saves its state although its driver was killed; the reaper ends these processes after that.
    """

    def theirs() -> Any:
        from ray._private import utils

        return utils, utils.set_kill_on_parent_death_linux

    found = _or_nothing(theirs, "a stopped run on a Ray of its own is cut off when its driver is killed")
    if found is not None:
        found[0].set_kill_on_parent_death_linux = lambda: None
    try:
        yield
    finally:
        if found is not None:
            found[0].set_kill_on_parent_death_linux = found[1]


@contextlib.contextmanager
def silent_about_deaths() -> Iterator[None]:
    """Suppress Ray's own messages about worker deaths in this context: this package reports each in one line.

    What workers print is still shown.
    """

    def filters() -> list[Any]:
        from ray._private import ray_logging

        found = [ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator]
        return [filter_ for filter_ in found if filter_.skip_re is None]

    changed = _or_nothing(filters, "Ray prints ten lines of its own when a worker dies") or []
    for filter_ in changed:
        filter_.skip_re = re.compile(SILENCED)
    try:
        yield
    finally:
        for filter_ in changed:
            filter_.skip_re = None


@contextlib.contextmanager
def plain_outside_terminals() -> Iterator[None]:
    """Show what workers print as it is in this context, if it goes to a file or a pipe.

    By default Ray colours the names of processes, and shows a line that several workers print once, with a count. What
    the user has set for either is kept. Open it before Ray starts, so that it covers the end of Ray.
    """
    files = [stream is None or not stream.isatty() for stream in (sys.stdout, sys.stderr)]

    def filters() -> list[Any]:
        from ray._private import ray_logging

        both = (ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator)
        return [(filter_, filter_.allow_re) for filter_, file in zip(both, files, strict=True) if file]

    chosen = any(name in os.environ for name in ("RAY_DEDUP_LOGS", "RAY_DEDUP_LOGS_ALLOW_REGEX"))
    changed = [] if chosen else _or_nothing(filters, "Ray shows a line that several workers print only once") or []
    # Not by Ray's own switch, which would also show its messages about deaths.
    for filter_, _ in changed:
        filter_.allow_re = re.compile(f"^(?!.*({SILENCED}))", re.DOTALL)
    colour = "RAY_COLOR_PREFIX"
    plain = any(files) and colour not in os.environ
    if plain:
        os.environ[colour] = "0"
    try:
        yield
    finally:
        for filter_, before in changed:
            filter_.allow_re = before
        if plain:
            del os.environ[colour]


@contextlib.contextmanager
def own_lines_apart(name: str, *, prints: bool = True) -> Iterator[Callable[[], Path | None]]:
    """Let Ray's own lines be written to a file in this context, instead of this process's output.

    What workers print is still shown, marked by their processes, unless `prints` is False. Open the context before Ray
    starts, so that it covers the end of Ray; the yielded function, called once Ray runs, begins and returns the file.
    It is beside Ray's logs, and its name includes `name`; None if this Ray lacks the interface.
    """

    def theirs() -> Any:
        from ray._private import worker

        return worker, worker.print_worker_logs

    found = _or_nothing(theirs, "Ray's own lines appear between those of the run")
    if found is None:
        yield lambda: None
        return
    module, show = found
    logger = logging.getLogger("ray")
    handlers = logger.handlers[:]
    with contextlib.ExitStack() as opened:
        file: TextIO | None = None

        def begin() -> Path:
            nonlocal file
            file = opened.enter_context(_beside_rays_logs(f"raytrain-{name}-{os.getpid()}.log"))
            into_file = logging.StreamHandler(file)
            into_file.setFormatter(handlers[0].formatter if handlers else None)
            logger.handlers[:] = [into_file]
            return Path(file.name)

        def sort(data: dict[str, Any], print_file: Any, ignore_prefix: bool = False) -> None:
            own: dict[bool, list[str]] = {True: [], False: []}
            for line in data.get("lines", []):
                own[file is not None and (not prints or rays_own(data.get("pid"), line))].append(line)
            if own[True]:
                kept = io.StringIO()
                show({**data, "lines": own[True]}, kept, False)
                # The thread that prints must survive a full disk, and lines that come after the end of the run.
                with contextlib.suppress(OSError, ValueError):
                    print(COLORS.sub("", kept.getvalue()), end="", file=file, flush=True)
            if own[False]:
                show({**data, "lines": own[False]}, print_file, ignore_prefix)

        module.print_worker_logs = sort
        try:
            yield begin
        finally:
            module.print_worker_logs = show
            logger.handlers[:] = handlers


def _beside_rays_logs(name: str) -> TextIO:
    """Open a file of this name beside Ray's logs; in a temporary folder if Ray's belongs to another user."""

    def theirs() -> Path:
        from ray._private import worker

        node: Any = worker._global_node
        return Path(node.get_logs_dir_path())

    folder = _or_nothing(theirs, "Ray's own lines are written to a temporary folder")
    with contextlib.suppress(OSError):
        if folder is not None:
            return (folder / name).open("a", errors="backslashreplace")
    return Path(tempfile.mkdtemp(prefix="raytrain-"), name).open("a", errors="backslashreplace")


def rays_own(pid: object, line: str) -> bool:
    """Return whether Ray or Horovod wrote this line of the process `pid`, rather than the user's code there.

    >>> rays_own("raylet", "Spilled 2 objects"), rays_own(17, "[2026-01-05 10:00:00,123 E 17 17] rpc.cc:1: no answer")
    (True, True)
    >>> rays_own(17, "UserWarning: the learning rate is 0")
    False
    """
    # Ray gives its own processes a name: raylet, autoscaler, gcs_server.
    return not str(pid).isdigit() or OF_LIBRARIES.match(line) is not None


def show_repeated_prints() -> None:
    """Show how often workers repeated a line that Ray has shown only once; by default Ray does so when it ends."""

    def flush() -> None:
        from ray._private import ray_logging, worker

        prefixed = worker._should_ignore_worker_log_prefix(worker.global_worker)
        for filter_, stream in (
            (ray_logging.stdout_deduplicator, sys.stdout),
            (ray_logging.stderr_deduplicator, sys.stderr),
        ):
            for batch in filter_.flush():
                worker.print_worker_logs(batch, stream, prefixed)

    _or_nothing(flush, "repeated lines are counted after the end of the run")


def _or_nothing(ask: Callable[[], T | None], consequence: str) -> T | None:
    try:
        return ask()
    except (ImportError, AttributeError, TypeError) as error:
        logging.getLogger(__name__).warning(
            "Ray %s lacks an interface of Ray %s (%s); as a result, %s", ray.__version__, SEEN, error, consequence
        )
        return None


def started_again() -> bool:
    """Return whether this actor had another process before, which has died."""
    with warnings.catch_warnings():
        # Ray warns of a property of its own that it uses here.
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def restarts() -> int:
    """Return how often Ray has started this actor again."""

    def found() -> int:
        return int(_actor_entry(ray.get_runtime_context().get_actor_id()).get("NumRestarts", 0))

    return _or_nothing(found, "a controller that dies before its run begins is started again and again") or 0


def starts_again(actor: Any) -> bool:
    """Return whether Ray is about to start this actor again, because its process has died."""

    def found() -> bool:
        return bool(_actor_entry(actor._actor_id.hex()).get("State") == "RESTARTING")

    return bool(_or_nothing(found, "a run whose controller is being replaced counts as ended"))


def _actor_entry(actor_id: str | None) -> dict[str, Any]:
    """Return what Ray's GCS knows of an actor."""
    from ray._private.state import actors

    found: dict[str, Any] = actors(actor_id)
    return found
