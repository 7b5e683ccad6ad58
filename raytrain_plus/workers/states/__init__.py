"""The state that a worker holds, gives, receives, copies and saves."""
