"""Checks of a job before it runs: its settings, its data, its machines, and a trial of its task."""
