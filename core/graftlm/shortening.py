"""Shortens long texts for messages."""

__all__ = ["shortened"]


def shortened(text: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters; the middle of a longer text is replaced by its length."""
    if len(text) <= max_chars:
        return text
    note = f"[... {len(text):,} characters ...]"
    kept = max(0, max_chars - len(note))
    return f"{text[: kept - kept // 3]}{note}{text[len(text) - kept // 3 :]}"
