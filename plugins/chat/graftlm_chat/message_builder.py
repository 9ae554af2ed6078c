"""Collects the deltas of a message."""

from graftlm.contracts import ContentDelta, MessageDelta, ToolCallDelta

__all__ = ["MessageBuilder"]


class MessageBuilder:
    """Collects content and calls in order. Removes white space before and after calls."""

    def __init__(self) -> None:
        self._deltas: list[MessageDelta] = []
        self._space = ""
        self._after_call = False
        self._num_calls = 0

    def content(self, text: str) -> None:
        """Add content."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._after_call = False
            self._deltas.append(ContentDelta(stripped))

    def call(self, name: str) -> None:
        """Start a call."""
        self._space = ""
        self._after_call = True
        self._deltas.append(ToolCallDelta(self._num_calls, name, ""))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, None, text))

    def take(self) -> list[MessageDelta]:
        """Return the deltas that were not returned before."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> list[MessageDelta]:
        """Return the remaining deltas at the end of the text."""
        if self._space and not self._after_call:
            self._deltas.append(ContentDelta(self._space))
        return self.take()
