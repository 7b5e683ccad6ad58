"""Two ranks that share one GPU: how long their worlds take to form, and an all-reduce of 64 MiB.

python -m tests.benchmarks.gpu_sums [--rounds 5] [--sums 10] [--device cpu]

One sums in pinned memory, by a ring of the host; the other by NCCL. The GPU takes turns between the two processes, and
nothing crosses a link between GPUs: this tells nothing about several GPUs. On a CPU, stand-ins take the GPU's place.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from tests.gpu import DEVICE, nccl_version
from tests.support.worlds import form, members, server

RANKS = 2
LENGTH = 16 << 20
"""Elements of a sum: 64 MiB of float32."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="formings")
    parser.add_argument("--sums", type=int, default=10, help="of a round")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: nothing is measured")
        return 0
    if options.device == "cuda":
        nccl = ".".join(map(str, nccl_version()))
        print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, NCCL {nccl}")
    else:
        print("stand-ins for a GPU and for NCCL: only the rows of the host mean anything")
    print(f"{RANKS} ranks share the device; this tells nothing about several GPUs")
    print(f"\n{'':24} {'forms, s':>9} {'ms a sum':>9} {'GB/s':>7}", flush=True)
    for kind, module in (("staged horovod", "horovod"), ("staged torch", "torch"), ("nccl", "nccl")):
        on_gpu = options.device == "cuda"
        if find_spec(module) is None and (on_gpu or module != "nccl"):
            print(f"{kind:24} left out: {module} is not installed", flush=True)
            continue
        formed, sums = measured(f"gpu {kind}" if on_gpu else kind, options.rounds, options.sums)
        print(row(kind, formed["nccl" if kind == "nccl" else "host"], sums), flush=True)
    return 0


def measured(kind: str, rounds: int, sums: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each forming, by what formed, and of each sum; of the slowest rank each.

    The first forming does not count: it loads libraries.
    """
    formed, seconds = defaultdict[str, list[float]](list), list[float]()
    with members(RANKS, kind) as group:
        for generation in range(rounds + 1):
            with server(RANKS) as (_, door):
                answers = form(group, door, generation)
                if not all("rank" in answer for answer in answers):
                    raise RuntimeError(f"{kind} did not form: {answers}")
                times = [member.ask(do="times") for member in group]
                for member in group:
                    member.tell(do="measure", length=LENGTH, count=sums)
                found = [member.hear()["seconds"] for member in group]
                for member in group:
                    member.tell(do="close")
                assert [member.hear() for member in group] == [{"closed": True}] * RANKS
            if generation:
                for what in times[0]:
                    formed[what].append(max(one[what] for one in times))
                seconds += [max(both) for both in zip(*found, strict=True)]
    return formed, seconds


def row(name: str, formed: Sequence[float], sums: Sequence[float]) -> str:
    """Return a row of the table: medians."""
    seconds = statistics.median(sums)
    return f"{name:24} {statistics.median(formed):9.3f} {1e3 * seconds:9.2f} {4 * LENGTH / seconds / 1e9:7.2f}"


if __name__ == "__main__":
    sys.exit(main())
