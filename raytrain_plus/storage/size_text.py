"""Format numbers of bytes for people. Pure."""

from __future__ import annotations


def size_text(size: int) -> str:
    """Return a number of bytes as text in the largest unit that it reaches; units are powers of 1,000.

    >>> size_text(7_250_000), size_text(812)
    ('7.2 MB', '812 bytes')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
