"""Searches in text that arrives in pieces."""

__all__ = ["held_back"]


def held_back(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may be the start of an incomplete marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
