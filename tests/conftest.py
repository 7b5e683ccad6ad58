"""The environment of every test, however it is started."""

from __future__ import annotations

import os

# Set before torch and Ray are loaded, which read them then. One thread per process: more would compete for few cores,
# and torch's flags for denormal numbers belong to a thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
