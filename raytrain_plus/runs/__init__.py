"""A run that is known by its folder."""
