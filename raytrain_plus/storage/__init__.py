"""Files of runs and data, on file systems and on object stores."""
