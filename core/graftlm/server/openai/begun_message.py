"""Messages that the client has begun and has the model continue."""

from collections.abc import Sequence
from typing import Any

from graftlm.contracts import ContentDelta, ReasoningDelta, ReasoningFormat, ReasoningParser

__all__ = ["ContinuingParser", "begun_text", "is_within_reasoning"]


def begun_text(messages: Sequence[Any]) -> str:
    """Return the text of a conversation's last message; "" if it has none."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


def is_within_reasoning(reasoning: ReasoningFormat, begun: str) -> bool:
    """Whether what follows the beginning of a message belongs to its reasoning."""

    def thoughts(text: str) -> str:
        parser = reasoning.parser(is_open=False)
        deltas = [*parser.push(text), *parser.finish()]
        return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))

    return bool(begun) and len(thoughts(f"{begun}x")) > len(thoughts(begun))


class ContinuingParser(ReasoningParser):
    """Reads on in a message of which the client has the beginning, and tells what is new.

    What the format's parser holds back of the beginning, because it may be part of a tag or white space at an end, it
    tells with the text that follows; here it is left out.
    """

    def __init__(self, reasoning: ReasoningFormat, begun: str) -> None:
        self._parser = reasoning.parser(is_open=False)
        told = "".join(delta.text for delta in self._parser.push(begun))
        self._kind: type[ReasoningDelta | ContentDelta] = ContentDelta
        self._held = "" if told else begun
        if is_within_reasoning(reasoning, begun):
            self._kind = ReasoningDelta
            thoughts = begun.partition(reasoning.begin)[2] if reasoning.begin else begun
            self._held = (thoughts if thoughts.startswith(told) else thoughts.lstrip())[len(told) :]

    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        """Take in more text; returns what is certain by now."""
        return self._new(self._parser.push(text))

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        """Take in the end of the text; returns what was held back."""
        return self._new(self._parser.finish())

    def _new(self, deltas: Sequence[ReasoningDelta | ContentDelta]) -> Sequence[ReasoningDelta | ContentDelta]:
        if not deltas or not self._held:
            return deltas
        held, self._held = self._held, ""
        first = deltas[0]
        if not isinstance(first, self._kind):
            return deltas  # what was held back was a tag, or white space around one
        # Parsers leave out white space at either end of the reasoning.
        known = next((text for text in (held, held.lstrip(), held.strip()) if first.text.startswith(text)), "")
        text = first.text[len(known) :]
        return [*([type(first)(text)] if text else []), *deltas[1:]]
