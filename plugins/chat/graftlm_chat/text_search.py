"""Search in text that comes in pieces."""

__all__ = ["held_back"]


def held_back(text: str, marker: str) -> int:
    """Return how many of a text's last characters may be the beginning of a marker, fewer than the whole of it."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
