"""What reads the rows of each format; `formats` says which format a path has."""
