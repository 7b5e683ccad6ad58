"""What a run reports: events, result, ledger, gauges; and who may write them."""
