"""The machine of a worker: its GPU, its memory, and the notice that it will go."""
