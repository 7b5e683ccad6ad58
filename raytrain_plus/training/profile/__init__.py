"""Profiles of some steps: traces, and the seconds of their phases."""
