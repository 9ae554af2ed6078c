"""Messages that the model continues. The client sends their beginning."""

from collections.abc import Sequence
from typing import Any

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser

__all__ = ["ContinuingParser", "begun_text", "is_within_reasoning"]


def begun_text(messages: Sequence[Any]) -> str:
    """Return the text of a conversation's last message; "" if it has no text."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


def is_within_reasoning(reasoning: ReasoningFormat, begun: str) -> bool:
    """Return whether the text that follows the beginning of a message belongs to the message's reasoning.

    Args:
        begun: the beginning of the message.
    """

    def reasoning_text(text: str) -> str:
        parser = reasoning.parser(is_open=False)
        deltas = [*parser.push(text), *parser.finish()]
        return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))

    return bool(begun) and len(reasoning_text(f"{begun}x")) > len(reasoning_text(begun))


class ContinuingParser(ReasoningParser):
    """Parses the continuation of a message whose beginning the client has sent.

    The format's parser gets the beginning first. The parser may hold back the end of the beginning, since this text may
    be part of a tag or trailing white space. It then returns this text together with the text that follows. This class
    removes the text of the beginning, so only text of the continuation is returned.

    Args:
        begun: the beginning of the message.
    """

    def __init__(self, reasoning: ReasoningFormat, begun: str) -> None:
        self._parser = reasoning.parser(is_open=False)
        returned = "".join(delta.text for delta in self._parser.push(begun))
        self._kind: type[ReasoningDelta | ContentDelta] = ContentDelta
        self._held_back = "" if returned else begun
        if is_within_reasoning(reasoning, begun):
            self._kind = ReasoningDelta
            begun_reasoning = begun.partition(reasoning.begin)[2] if reasoning.begin else begun
            if not begun_reasoning.startswith(returned):
                begun_reasoning = begun_reasoning.lstrip()
            self._held_back = begun_reasoning[len(returned) :]

    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        """Parse more text, and return the deltas that are certain now."""
        return self._without_beginning(self._parser.push(text))

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        """End the text, and return the deltas that were held back."""
        return self._without_beginning(self._parser.finish())

    def _without_beginning(
        self, deltas: Sequence[ReasoningDelta | ContentDelta]
    ) -> Sequence[ReasoningDelta | ContentDelta]:
        if not deltas or not self._held_back:
            return deltas
        held_back, self._held_back = self._held_back, ""
        first = deltas[0]
        if not isinstance(first, self._kind):
            return deltas  # the text that was held back is a tag, or white space around a tag
        # The parser may have removed white space at the ends of the text, because it does so at the ends of reasoning.
        variants = (held_back, held_back.lstrip(), held_back.strip())
        known = next((text for text in variants if first.text.startswith(text)), "")
        text = first.text[len(known) :]
        return [*([type(first)(text)] if text else []), *deltas[1:]]
