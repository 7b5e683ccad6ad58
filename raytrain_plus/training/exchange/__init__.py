"""What the workers of a step tell one another and the controller, and what they are asked."""
