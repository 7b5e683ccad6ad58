"""Check that the machines of a cluster see what a run needs there: its storage, its data, Horovod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.of_job import data_paths
from raytrain_plus.errors import InputError
from raytrain_plus.install.horovod_usable import horovod_state
from raytrain_plus.storage.place import RemotePath, place_of
from raytrain_plus.storage.probe import Probe, find_probe_fault, refusal


@dataclass(frozen=True, slots=True)
class Needs:
    """What a machine must see."""

    probe: Probe
    """The probe that the driver has left in the storage."""
    data: Mapping[str, int]
    """Data files and their sizes in bytes, of remote ones the first; empty if each machine makes its own data."""
    horovod: bool
    """Whether the run needs Horovod."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The problems that a machine found; a field is empty if there is none."""

    storage: str
    data: str
    horovod: str


def needs_of(order: RunOrder, probe: Probe) -> Needs:
    """Return what each machine must see for this run."""
    files: dict[str, int] = {}
    datasets = [data for data in (order.plan.data, order.plan.held_out) if data is not None]
    for source in (source for data in datasets for source in data.parts):
        if order.plan.job.data.prepare is not None:
            continue
        # Each machine converts its own copy.
        own = source.user_files
        # One remote file shows whether the store can be reached; each would be a round trip.
        first = next(iter(own), None)
        files |= {first: own[first]} if first is not None and isinstance(place_of(first), RemotePath) else own
    return Needs(probe, files, order.plan.collective == "horovod")


def check_machine(needs: Needs) -> Seen:
    """Check this machine and return the problems found."""
    return Seen(find_probe_fault(needs.probe), _look_at_data(needs), _look_at_horovod(needs))


def _look_at_data(needs: Needs) -> str:
    for file, size in needs.data.items():
        try:
            place = place_of(file)
            if isinstance(place, RemotePath):
                entry = place.look()
                there = None if entry is None else entry.size
            else:
                there = os.stat(file).st_size
            if there != size:
                return f"sees {'no file' if there is None else 'a file of another size'} at {place}"
        except OSError as error:
            return f"cannot read {place}: {error.strerror or error}"
    return ""


def _look_at_horovod(needs: Needs) -> str:
    state = horovod_state()
    return state.reason if needs.horovod and not state.usable else ""


def check_seen(order: RunOrder, machine: str, seen: Seen) -> None:
    """Raise `InputError` if the machine named `machine` does not see what the run needs."""
    job = order.plan.job
    if seen.storage:
        raise refusal(machine, seen.storage, job.storage)
    if seen.data:
        raise InputError(
            f"the machine {machine} {seen.data}",
            where=", ".join(data_paths(job)),
            expected="the same files on all machines of the cluster",
            remedy="put the data on a shared file system or where all machines may read it, or set data.prepare to a "
            "function that makes it on each",
        )
    if seen.horovod:
        raise InputError(
            f"Horovod cannot be used on the machine {machine}: {seen.horovod}",
            where=f"collective: {job.collective}",
            remedy="run raytrain install-horovod there; or --set collective=torch",
        )
