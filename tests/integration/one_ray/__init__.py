"""Tests that share one Ray of four logical CPUs on this machine."""
