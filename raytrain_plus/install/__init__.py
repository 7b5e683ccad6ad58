"""The environment: `raytrain doctor`, GPUs, and a Horovod that is built for the installed torch."""
