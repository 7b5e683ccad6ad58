"""The data of a job: what it is, in which order its rows are used, and how they reach a step."""
