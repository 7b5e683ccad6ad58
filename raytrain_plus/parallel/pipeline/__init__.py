"""Pipelines: a model's layers cut into stages, microbatches running through them."""
