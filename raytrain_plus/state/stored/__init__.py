"""A state in files: checkpoints and their manifests, who writes which share, hashes of whole states."""
