"""Audit a run in a process that does nothing else, and print what that took.

python -m tests.benchmarks.audited RUN -> seconds, the most memory in MiB, whether it is clean, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from raytrain_plus.audit.audit import audit

REPOSITORY = Path(__file__).parents[2]


def main(run: str) -> None:
    start = time.perf_counter()
    found = audit(run)
    took = time.perf_counter() - start
    # getrusage reports at least what the parent held when it started this process.
    status = Path("/proc/self/status").read_text()
    [peak] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    print(json.dumps([took, peak / 1024, found.clean]))


def audited(run: Path) -> tuple[float, float, bool]:
    """Return seconds, MiB, and whether the run is clean."""
    command = [sys.executable, "-m", "tests.benchmarks.audited", str(run)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=REPOSITORY)
    took, peak, clean = json.loads(done.stdout)
    return took, peak, clean


if __name__ == "__main__":
    main(sys.argv[1])
