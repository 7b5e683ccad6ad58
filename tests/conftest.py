"""What every test runs under, however it is started."""

from __future__ import annotations

import os

# Before torch and Ray are loaded, which read them then. One thread a process: its threads would fight for few cores,
# and torch's flags for the handling of numbers are a thread's own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
