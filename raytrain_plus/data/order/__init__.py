"""Which rows are used when, by which shard. Pure."""
