"""What the death of a worker costs: this platform and its peers, the same small model, one after the other.

python -m tests.benchmarks.recovery [--model byte_gpt] [--kills 60] [--peers 10] [--rounds 1] [--only ours,torchft]

Four workers train, as four copies of the model, as two replicas of two stages, or as one of four, which is then
partitioned into three or, if two die at once, into two. The worker to be killed, with SIGKILL, is drawn at random. The
stall runs from the last step before the kill to the next one that needed all remaining workers, less one step. torchft
is measured if it is installed (`torchft==0.2.0`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers import horovod_elastic, ours, ray_train, torchft, torchrun

Measure = Callable[..., list[Incident]]

CONTESTANTS: dict[str, tuple[str, Measure, float]] = {
    "ours": ("raytrain_plus, shrinking", ours.measure, 1.0),
    "sharded": ("raytrain_plus, sharded: optimizer", partial(ours.measure, sharded="optimizer"), 1.0),
    "full": ("raytrain_plus, sharded: full", partial(ours.measure, sharded="full"), 1.0),
    "spare": ("raytrain_plus, with a spare", partial(ours.measure, spares=1), 1.0),
    "sharded_spare": ("raytrain_plus, optimizer, a spare", partial(ours.measure, sharded="optimizer", spares=1), 1.0),
    "full_spare": ("raytrain_plus, full, a spare", partial(ours.measure, sharded="full", spares=1), 1.0),
    "stages": ("raytrain_plus, 2 x 2 stages", partial(ours.measure, pipeline=2), 1.0),
    "sharded_stages": ("raytrain_plus, optimizer, 2 x 2", partial(ours.measure, sharded="optimizer", pipeline=2), 1.0),
    "stages_spare": ("raytrain_plus, 2 x 2, a spare", partial(ours.measure, pipeline=2, spares=1), 1.0),
    "repartition": ("raytrain_plus, 4 stages to 3", partial(ours.measure, pipeline=4), 1.0),
    "repartition_two": ("raytrain_plus, 4 stages to 2", partial(ours.measure, pipeline=4, two=True), 1.0),
    "torchft": ("torchft 0.2.0", torchft.measure, 1.0),
    "torchrun": ("torchrun, restarts", torchrun.measure, 1.0),
    "ray_train": ("Ray Train V2", ray_train.measure, 1.0),
    "horovod_elastic": ("Horovod Elastic", horovod_elastic.measure, 0.5),
}
"""What it is called, how it is measured, and which share of the peers' kills it gets."""


HEAD = f"  {'':30}   went on     p50 s     max s   lost  repeated kept %   step ms"


def row(name: str, incidents: Sequence[Incident]) -> str:
    """Return one line of the table."""
    stalls = sorted(incident.stall_s for incident in incidents if incident.stall_s is not None)
    went_on = f"{len(stalls)}/{len(incidents)}"
    if not stalls:
        return f"  {name:30} {went_on:>9}"
    step_ms = 1000 * statistics.median(incident.step_s for incident in incidents)
    lost = sum(incident.steps_lost for incident in incidents)
    repeated = sum(incident.steps_repeated for incident in incidents)
    kept = 100 * statistics.mean(incident.kept for incident in incidents)
    return (
        f"  {name:30} {went_on:>9} {statistics.median(stalls):9.2f} {stalls[-1]:9.2f} {lost:6} {repeated:9} "
        f"{kept:6.1f} {step_ms:9.0f}"
    )


LONGEST_S = {
    "ours": {"p50": 0.35, "max": 1.5},
    "sharded": {},
    "full": {},
    "spare": {"p50": 0.6},
    "sharded_spare": {},
    "full_spare": {},
    "sharded_stages": {},
    "stages": {"p50": 0.6},
    "stages_spare": {"p50": 0.6},
    "repartition": {"p50": 1.5},
    "repartition_two": {"p50": 1.5},
}
"""Limits of the stalls, in seconds."""
KEPT = 97.0
"""Minimum percentage of the kills after which every survivor continues in its process."""
SOME_STAND_BY = ("stages", "sharded_stages", "repartition", "repartition_two")
"""Cases in which the dead worker's replica dissolves until another worker has come."""
AS_LONG_AS = {
    "sharded": "ours",
    "full": "ours",
    "sharded_spare": "spare",
    "full_spare": "spare",
    "sharded_stages": "stages",
}
"""Cases that may stall `AS_LONG` times as long as others, by their p50."""
AS_LONG = 1.25
FASTER = {"torchft": 3, "ray_train": 30}
"""Minimum factors by which these stall longer than this platform, shrinking; by their p50."""


def verdicts(key: str, measured: Mapping[str, Sequence[Incident]]) -> list[str]:
    """Return each limit of `key`'s figures beside its figure, and whether it is met."""

    def stalls(of: str) -> list[float]:
        return [math.inf if one.stall_s is None else one.stall_s for one in measured[of]]

    def verdict(what: str, figure: str, met: bool) -> str:
        return f"wanted {what}: {figure}, {'met' if met else 'NOT MET'}"

    found = []
    if key in LONGEST_S:
        figures = {"p50": statistics.median(stalls(key)), "max": max(stalls(key))}
        for name, most in LONGEST_S[key].items():
            found.append(verdict(f"{name} <= {most} s", f"{figures[name]:.2f} s", figures[name] <= most))
        if (other := AS_LONG_AS.get(key)) in measured:
            times = figures["p50"] / max(statistics.median(stalls(str(other))), 1e-3)
            found.append(verdict(f"p50 <= {AS_LONG} x that of {other}", f"{times:.2f}", times <= AS_LONG))
        lost = sum(one.steps_lost for one in measured[key])
        found.append(verdict("0 steps lost", str(lost), lost == 0))
        kept = 100 * statistics.mean(one.kept == 1.0 for one in measured[key])
        if key not in SOME_STAND_BY:
            found.append(verdict(f"every survivor kept in >= {KEPT:.0f} % of the kills", f"{kept:.1f} %", kept >= KEPT))
    elif key in FASTER and "ours" in measured:
        times = statistics.median(stalls(key)) / max(statistics.median(stalls("ours")), 1e-3)
        found.append(verdict(f">= {FASTER[key]} times as long as this platform", f"{times:.0f}", times >= FASTER[key]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="byte_gpt", choices=["byte_gpt", "25m"])
    parser.add_argument("--kills", type=int, default=60, help="of this platform's workers, each way")
    parser.add_argument("--peers", type=int, default=10, help="of each peer's; Horovod Elastic, which is slow, half")
    parser.add_argument(
        "--rounds", type=int, default=1, help="in which all take turns, each with its part of the kills"
    )
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="who takes part")
    parser.add_argument("--keep", type=Path, help="an empty folder for what the runs leave; else it is deleted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as made:
        folder = options.keep or Path(made)
        print(f"{options.model}: four workers; what the death of one, or of two at once, costs")
        print(HEAD)
        measured: dict[str, list[Incident]] = {}
        for number in range(options.rounds):
            for key in options.only.split(","):
                name, measure, share = CONTESTANTS[key]
                if key == "torchft" and find_spec("torchft") is None:
                    print(f"  {name:30} is not installed: pip install torchft==0.2.0", flush=True)
                    continue
                kills = options.kills if key in LONGEST_S else round(share * options.peers)
                found = measure(folder / key / f"round-{number}", -(-kills // options.rounds), model=options.model)
                measured.setdefault(key, []).extend(found)
                if number == options.rounds - 1:
                    report(key, measured, folder, judged=options.model == "byte_gpt")


def report(key: str, measured: Mapping[str, Sequence[Incident]], folder: Path, *, judged: bool) -> None:
    """Print what was measured of one contestant, whose runs are under `folder`; `judged`: beside the limits."""
    print(row(CONTESTANTS[key][0], measured[key]), flush=True)
    for said in verdicts(key, measured) if judged else ():
        print(f"  {'':30} {said}", flush=True)
    if key in LONGEST_S:
        told = ours.recoveries(folder / key)
        phases = [recovery["phases"] for recovery in told]
        medians = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
        spelled = ", ".join(f"{name} {seconds:.3f}" for name, seconds in medians.items())
        print(f"  {'':30} medians of its phases, in seconds: {spelled}", flush=True)
        replaced = sum(bool(recovery["replaced"]) for recovery in told)
        print(f"  {'':30} a spare took the dead one's place in {replaced} of {len(told)}", flush=True)


if __name__ == "__main__":
    main()
