"""The training state: named tensors and a JSON tree; its parts, hashes, files."""
