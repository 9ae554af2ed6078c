"""Appends output that a grammar forces, without sampling it: jump-forward (arXiv:2312.07104, section 4).

A grammar forces characters, but a model reads tokens. The appended tokens must be the tokenizer's tokens for the whole
text, because the model has rarely seen other tokenizations in training. Therefore the latest tokens are encoded again
together with the forced text:

    sampled      | {" | summ |                         the grammar forces  ary": "
    encoded      | {" | summary | ": | "  |
                   kept  instead of summ

Together with the text that follows, the last token (here `"`) may be the start of a longer token. If the grammar allows
such a longer token, the last token is not appended, and the model samples one of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from graftlm.scheduling.request import Request
from graftlm.types import TokenIds

__all__ = ["Jump", "JumpForward", "Retokenizer"]

_REPLACEMENT: Final = "\ufffd"
_WINDOWS: Final = (8, 4, 2, 1, 0)  # numbers of latest tokens to encode again; the first number that succeeds is used
_CONTEXT: Final = 4  # number of tokens before the window that are also decoded: decoding may drop a space at the start
_MAX_CHAR_BYTES: Final = 4  # a character has at most this number of bytes, so at most this number of tokens
_MAX_CHARS: Final = 2048  # maximum number of characters of forced text that one call appends


class Retokenizer(Protocol):
    """The methods of a tokenizer that `JumpForward` calls."""

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text that is part of a longer text."""
        ...

    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Jump:
    """A change of a request's output.

    Attributes:
        dropped: the latest tokens of the output, which are removed.
        token_ids: the tokens that replace `dropped`. Their text is the text of `dropped` followed by `text`.
        text: the text that the grammar forced.
    """

    dropped: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class _Window:
    """The latest tokens of a request, which are encoded again.

    Attributes:
        token_ids: the latest tokens.
        text: the text of `token_ids`.
        before: the text of `context`.
        context: the tokens before `token_ids`.
    """

    token_ids: list[int]
    text: str
    before: str
    context: list[int]


class JumpForward:
    """Finds the tokens that a request's grammar forces, and advances the matcher by them."""

    def __init__(self, tokenizer: Retokenizer) -> None:
        self._tokenizer = tokenizer

    def find(self, request: Request) -> Jump | None:
        """Return the change of a request's output that its grammar forces; None if there is none.

        The changed output ends at least one token before `max_new_tokens`. The result is None if the request has
        `jump_forward=False` or reports log-probabilities, which forced tokens do not have. It is also None if the
        forced text completes a stop string or ends the request; such text is sampled.

        Effects: the request's grammar accepts the tokens of the returned jump. The request's tokens are unchanged.

        Raises:
            RequestFailedError: the grammar backend failed.
        """
        grammar = request.grammar
        params = request.params
        if grammar is None or params.logprobs is not None or params.jump_forward is False:
            return None
        text = grammar.forced_text()[:_MAX_CHARS]
        room = request.max_new_tokens - request.num_output_tokens - 1  # the last token is always sampled
        while text and room > 0 and not self._may_stop(request, text):
            found = next((f for size in _WINDOWS if (f := self._spell(request, size, text)) is not None), None)
            if found is None or not request.stop_token_ids.isdisjoint(found[1]):
                return None
            window, token_ids = found
            kept = _common(window.token_ids, token_ids)
            dropped, added = window.token_ids[kept:], token_ids[kept:]
            num_gained = len(added) - len(dropped)
            if num_gained > room:
                text = text[: len(text) * room // num_gained]
                continue
            if not added or not grammar.replace(dropped, added):
                return None
            if self._is_open(request, added[-1]):
                return self._without_last(request, window, dropped, added, kept)
            return Jump(tuple(dropped), tuple(added), text)
        return None

    def _spell(self, request: Request, size: int, text: str) -> tuple[_Window, list[int]] | None:
        """Encode the text of the latest `size` tokens together with the forced text after it; return the tokens.

        None if the tokens do not decode to this text, or if the first of several tokens changes, because then the
        tokens before the window might change too.
        """
        num_output = request.num_output_tokens
        if size > num_output:
            return None
        start = request.num_tokens - size
        latest = request.token_ids[start:].tolist()
        context = request.token_ids[max(0, start - _CONTEXT) : start].tolist()
        before, so_far = self._decode(context), self._decode(context + latest)
        if not so_far.startswith(before) or so_far.endswith(_REPLACEMENT):
            return None
        window = _Window(latest, so_far[len(before) :], before, context)
        token_ids = self._tokenizer.encode_inside(window.text + text)
        is_anchored = size <= 1 or size == num_output or token_ids[:1] == latest[:1]
        if not is_anchored or self._decode(context + token_ids) != so_far + text:
            return None
        return window, token_ids

    def _is_open(self, request: Request, last: int) -> bool:
        """Return whether the grammar also allows a longer token in place of `last`, the token that it accepted last."""
        grammar = request.grammar
        if grammar is None:
            return False
        bits = np.empty(grammar.num_words, dtype=np.int32)
        grammar.replace([last], [])
        try:
            grammar.fill(bits)
        finally:
            grammar.replace([], [last])
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        size = len(self._decode([last]).encode())
        if len(allowed) > size + len(request.stop_token_ids) + 1:
            return True  # more tokens are allowed than there can be prefixes of the last token
        return any(len(self._decode([token_id]).encode()) > size for token_id in allowed.tolist())

    def _without_last(
        self, request: Request, window: _Window, dropped: list[int], added: list[int], kept: int
    ) -> Jump | None:
        """Remove the last token from the jump, so that it is sampled, unless the jump would then add no text."""
        grammar = request.grammar
        if grammar is None:
            return None
        gained = self._gained(window, window.token_ids[:kept] + added[:-1])
        if dropped and (not gained or gained.endswith(_REPLACEMENT)):
            return Jump(tuple(dropped), tuple(added), self._gained(window, window.token_ids[:kept] + added))
        grammar.replace([added[-1]], [])
        return Jump(tuple(dropped), tuple(added[:-1]), gained) if gained else None

    def _gained(self, window: _Window, token_ids: list[int]) -> str:
        """Return the text by which `token_ids` extend a window's text."""
        return self._decode(window.context + token_ids)[len(window.before) + len(window.text) :]

    def _may_stop(self, request: Request, text: str) -> bool:
        """Return whether forced text, together with the text before it, may complete a stop string or pattern."""
        if request.params.stop_patterns:
            return True  # a pattern has no longest match, so it would have to be searched in the whole text
        stops = request.params.stop_strings
        if not stops:
            return False
        num_chars = max(map(len, stops))
        before = self._decode(request.output_token_ids[-_MAX_CHAR_BYTES * num_chars :].tolist())
        whole = before + text
        return any(stop in whole[max(0, len(before) - len(stop) + 1) :] for stop in stops)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    num = min(len(one), len(other))
    return next((i for i in range(num) if one[i] != other[i]), num)
