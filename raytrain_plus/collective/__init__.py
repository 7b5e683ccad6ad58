"""Worlds: members that sum and send tensors, on Horovod, Gloo, NCCL or alone."""
