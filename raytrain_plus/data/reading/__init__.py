"""From the order of rows to the batches of a step: read, transformed, divided, collated."""
