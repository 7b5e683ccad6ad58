"""Pipeline parallelism: a model's layers partitioned into stages, with microbatches passing through them."""
