"""Shared by the pure tests."""

from hypothesis import settings

# A deadline on one example measures the machine: on a busy one, any can take a second.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
