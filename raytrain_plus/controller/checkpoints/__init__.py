"""Checkpoints: when one is due, which are in progress, and going back to one."""
