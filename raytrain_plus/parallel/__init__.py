"""How the work of a step is divided: gradients and their sums, stages, slices."""
