"""A worker: an actor with control calls and one training thread."""
