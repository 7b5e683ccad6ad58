"""Limits of the requests to a store."""

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
"""Seconds without a byte."""
ATTEMPTS = 3
"""Attempts of a request; pyarrow's clients of other stores than S3 have their own limits."""
