"""Which shape and which settings make the fastest steps that fit, for each number of workers. Pure."""
