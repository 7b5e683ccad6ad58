"""Check a run's ledger by formulas of its own: it shares nothing with what planned and entered the rows."""
