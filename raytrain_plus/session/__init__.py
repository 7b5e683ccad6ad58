"""A training function with a loop of its own, as a task: the run calls it for one batch at a time."""
