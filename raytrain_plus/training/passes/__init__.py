"""Forward and backward over the microbatches of a step: whole models, stages, layers; held-out rows."""
