"""`Folder` on file systems and object stores, and files that grow in it."""
