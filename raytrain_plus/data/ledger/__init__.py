"""Notes of the rows that each shard has used, and their files."""
