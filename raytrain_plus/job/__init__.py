"""A job's settings: what they mean, what they allow, and whether two jobs are the same."""
