"""What is known of workers, and what follows from it for the next generation. Pure."""
