"""What a run tells: its events, and what they add up to."""
