"""From the sums of a step to a changed training state."""
