"""Tensor parallelism: weights cut into slices, which one worker or several host."""
