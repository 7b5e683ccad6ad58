"""raytrain_plus: elastic PyTorch training on Ray."""
