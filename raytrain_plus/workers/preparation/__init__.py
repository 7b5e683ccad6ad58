"""What a worker prepares before it trains: the task, its data, its measurements."""
