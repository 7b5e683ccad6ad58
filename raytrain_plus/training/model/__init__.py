"""The user's model: built under its random keys, in its precision, compiled or recomputed."""
