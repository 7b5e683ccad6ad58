"""The life of a group of workers, as a state machine and the plans that it needs. Pure."""
