"""The deltas of a message, in order."""

from graftlm.contracts import ContentDelta, MessageDelta, ToolCallDelta

__all__ = ["MessageBuilder"]


class MessageBuilder:
    """Puts content and calls in order; leaves out the white space next to calls."""

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
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._after_call = False
            self._deltas.append(ContentDelta(said))

    def call(self, name: str) -> None:
        """Begin a call."""
        self._space = ""
        self._after_call = True
        self._deltas.append(ToolCallDelta(self._num_calls, name, ""))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, None, text))

    def take(self) -> list[MessageDelta]:
        """Return what is new."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> list[MessageDelta]:
        """Return what is new at the end of the text."""
        if self._space and not self._after_call:
            self._deltas.append(ContentDelta(self._space))
        return self.take()
