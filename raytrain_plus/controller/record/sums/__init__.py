"""What committed steps, evaluations and losses add up to. Pure."""
