"""The files that a data path names, here and in remote storage, and whether they change."""
