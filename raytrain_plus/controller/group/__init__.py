"""The workers of a run: started, formed into a generation, watched, lost, replaced."""
