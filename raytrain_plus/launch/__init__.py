"""Start runs, and reach those that are running."""
