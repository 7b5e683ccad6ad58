"""The verbs of `raytrain`."""
