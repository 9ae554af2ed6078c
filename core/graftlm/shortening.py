"""How a text of any length is shown in a message."""

__all__ = ["shortened"]


def shortened(text: str, max_chars: int) -> str:
    """Return a text of bounded length: a long one without its middle, and with its number of characters."""
    if len(text) <= max_chars:
        return text
    note = f"[... {len(text):,} characters ...]"
    kept = max(0, max_chars - len(note))
    return f"{text[: kept - kept // 3]}{note}{text[len(text) - kept // 3 :]}"
