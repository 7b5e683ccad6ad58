"""What is tried before a run, and trains nothing: the task, its memory, the cost of its layers."""
