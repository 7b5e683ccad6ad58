"""Steps: what a worker's training thread does."""
