"""The one place that uses what Ray does not promise to keep. Where it is not there any more, less is known."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ray

SEEN = "2.60"
"""The newest Ray in which this was seen working."""

DEATH = "A worker died or was killed while executing a task"
"""How Ray begins ten lines about a worker's death on the driver's screen."""

HEAD = "node:__internal_head__"
"""A resource that a cluster's head alone has."""

WATCHER_S = 10.0
"""Limit of the end of a process that was killed."""

WITHOUT_GCS_S = 7 * 24 * 3600
"""Seconds for which a process lives on without Ray's GCS: longer than any wait of ours."""

DRAIN_S = 10.0
"""Limit of telling Ray that a node goes."""

T = TypeVar("T")


def draining_nodes() -> dict[str, float | None] | None:
    """Nodes that will leave: node id -> Unix seconds of the deadline, None where it has none.

    None where this Ray does not tell: a node's going is met as a loss then, when it goes.
    """

    def ask() -> dict[str, float | None] | None:
        from ray._private.state import state

        return {node: ms / 1000 if ms else None for node, ms in state.get_draining_nodes().items()}

    return _or_nothing(ask, "a node that will leave is noticed when it is gone")


def drain_node(address: str, node: str, why: str, deadline: float) -> bool | None:
    """Tells the Ray at `address` that the node with that id is taken away at `deadline`, in Unix seconds: who follows
    `draining_nodes` leaves it, and nobody comes.

    Whether Ray took that; None where this Ray cannot be told.
    """

    def tell() -> bool:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

        preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        # A deadline of none has a meaning of its own, and one that is over none.
        deadline_ms = math.ceil(max(deadline, time.time() + 0.001) * 1000)
        taken, refusal = GcsClient(address).drain_node(node, preempted, why, deadline_ms, timeout=DRAIN_S)
        if not taken:
            logging.getLogger(__name__).warning("Ray does not drain node %s: %s", node, refusal)
        return bool(taken)

    return _or_nothing(tell, "a node that will leave is noticed when it is gone")


def drain_this_node(why: str, deadline: float) -> bool | None:
    """The same of the node where this process is; and one that goes no later already is left alone."""
    context = ray.get_runtime_context()
    known = (draining_nodes() or {}).get(context.get_node_id())
    if known is not None and known <= deadline:
        return True
    return drain_node(context.gcs_address, context.get_node_id(), why, deadline)


def most_there_can_be() -> dict[str, float] | None:
    """The most of each resource that an autoscaler may bring the cluster to; None where none is known."""

    def ask() -> dict[str, float] | None:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
        return None if most is None else {name: float(amount) for name, amount in most.items()}

    return _or_nothing(ask, "a cluster counts as one that cannot grow, before a run starts")


def has_autoscaler() -> bool:
    """Whether an autoscaler, of the second version, which `ray up` and KubeRay start, looks after the cluster.

    It may bring more than is there; how much, Ray's own does not tell.
    """

    def ask() -> bool:
        from ray.autoscaler.v2.sdk import get_cluster_status

        # The number of its newest report; 0 where there was none yet.
        return (get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version or "0") != "0"

    return _or_nothing(ask, "a cluster counts as one that cannot grow, before a run starts") or False


def ray_data_on_the_head() -> None:
    """Has the actors that Ray Data keeps for a whole cluster started on its head, where they are not there yet.

    By itself Ray Data starts them on the node where it is first used. They outlive the run, and an autoscaler never
    lets a node go on which there is an actor, though it takes no CPU.
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
        # Ray starts no actor of one name from two threads at once; where that can be, Ray Data has these locks.
        with usage._get_or_create_lock:
            name = "DataUsageCollectionActor"
            ray.remote(usage._UsageCollectionActor).options(name=name, namespace=name, **kept).remote()
        with coordinator._get_or_create_lock:
            name = "AutoscalingCoordinator"
            again: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, **kept}
            ray.remote(coordinator._AutoscalingCoordinatorActor).options(name=name, namespace=name, **again).remote()

    _or_nothing(start, "an autoscaler cannot let a node go on which a run first used Ray Data")


def settings_of_our_own_ray() -> dict[str, Any]:
    """Internal settings of a Ray that is started for one run: its workers are what it is there for, and Ray would let
    everything else on the machine go first. None for a Ray that is newer than what was seen: an unknown one ends it.
    """
    newest = tuple(int(part) for part in ray.__version__.split(".")[:2])
    known = newest <= tuple(int(part) for part in SEEN.split("."))
    return {"worker_niceness": 0, "gcs_rpc_server_reconnect_timeout_s": WITHOUT_GCS_S} if known else {}


@contextlib.contextmanager
def without_its_gcs() -> Iterator[None]:
    """Have a connection to Ray that is made while this is open outlive the cluster's GCS: after a minute without one
    Ray ends the process. One that the user has configured is left as it is."""
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
    """Has Ray show a token that is there to the cluster that is joined next, unless RAY_AUTH_MODE says otherwise. By
    itself it does so only for a cluster that it finds on this machine.

    The cluster must ask for one: else it calls us without, and we, who ask for one now, refuse it.
    """

    def show() -> None:
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        if "RAY_AUTH_MODE" not in os.environ:
            _enable_token_auth()

    _or_nothing(show, "a cluster that asks for a token needs RAY_AUTH_MODE=token in the environment")


def show_token_if_any() -> bool:
    """Have Ray's clients show a token, if there is one and RAY_AUTH_MODE is not set; return whether they now do.

    Not where actors live on a cluster that asks for none: it could not call them any more.
    """

    def show() -> bool:
        from ray._private.authentication.authentication_token_setup import _enable_token_auth
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        if "RAY_AUTH_MODE" in os.environ or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            return False
        _enable_token_auth()
        return True

    return bool(_or_nothing(show, "a cluster that asks for a token needs RAY_AUTH_MODE=token in the environment"))


def hide_token() -> None:
    """Have Ray's clients show no token to the clusters that this process joins later, unless one is asked for again."""

    def hide() -> None:
        from ray._raylet import Config  # type: ignore[attr-defined]

        os.environ.pop("RAY_AUTH_MODE", None)
        # Ray holds what it has read from the environment.
        Config.initialize("")

    _or_nothing(hide, "a cluster that asks for no token needs RAY_AUTH_MODE=disabled in the environment")


def check_let_in(address: str) -> None:
    """Raises Ray's `AuthenticationError` where the cluster at `host:port` asks for a token and is shown none, or a
    wrong one: `ray.init` tries for 20 s, and says then that none answers. `RpcError` after 40 s where none does."""

    def ask() -> None:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        # It ends the process where one is to be shown and none is there.
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=address)

    _or_nothing(ask, "a cluster that asks for a token, and is not content with what it got, is said not to answer")


def is_submitted() -> bool:
    """Whether this process is the driver of a job that was submitted to a cluster."""

    def ask() -> bool:
        from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

        return "job_submission_id" in os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "")

    return bool(_or_nothing(ask, "a submitted run ends with its driver"))


def socket_of_our_own_ray() -> str:
    """Return the socket of the raylet that was started for one run, which its workers have in their command; empty if
    it did not start."""

    def ask() -> str:
        from ray._private import worker

        node = worker._global_node
        return "" if node is None else str(node.raylet_socket_name or "")

    return _or_nothing(ask, "a worker that just starts outlives a driver that is killed") or ""


def end_our_own_ray() -> None:
    """Ends the Ray that was started for one run. The watcher over its autoscaler, which it does not have, is ended
    first: it does not hear when it is asked to go, and Ray waits a second for it."""

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
    """While it is open, Ray leaves SIGTERM to whoever has it: its own handler raises, and what is raised in a callback
    of the interpreter's, or of the logging module's, is lost, and the signal with it."""

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
def silent_about_deaths() -> Iterator[None]:
    """While it is open, Ray prints nothing of its own on this process's screen when a worker dies: we say it in one
    line. What workers print is shown as before."""

    def filters() -> list[Any]:
        from ray._private import ray_logging

        found = [ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator]
        return [filter_ for filter_ in found if filter_.skip_re is None]

    changed = _or_nothing(filters, "Ray prints ten lines of its own when a worker dies") or []
    for filter_ in changed:
        filter_.skip_re = re.compile(re.escape(DEATH))
    try:
        yield
    finally:
        for filter_ in changed:
            filter_.skip_re = None


def _or_nothing(ask: Callable[[], T | None], consequence: str) -> T | None:
    try:
        return ask()
    except (ImportError, AttributeError, TypeError) as error:
        logging.getLogger(__name__).warning(
            "Ray %s lacks what was there in %s (%s): %s", ray.__version__, SEEN, error, consequence
        )
        return None
