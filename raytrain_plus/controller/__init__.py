"""The controller of a run: an actor that forms, watches and heals the group of workers."""
