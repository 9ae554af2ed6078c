"""Returns the bytes of single tokens, which may be parts of characters."""

import json
import re
from collections.abc import Callable
from typing import Any, Final

__all__ = ["TokenBytes"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: SentencePiece's character for a space.
_SPACE_MARK: Final = "\u2581"


class TokenBytes:
    """Returns the bytes that a token adds to a text.

    Byte-level vocabularies represent each byte by a printable character. Byte-fallback vocabularies represent a byte in
    the form <0x0A>. In other vocabularies a token's bytes are those of its text.
    """

    def __init__(
        self,
        tokenizer_json: str,
        id_to_token: Callable[[int], str | None],
        decode: Callable[[int], str],
    ) -> None:
        """Read the parts of a tokenizer.

        Args:
            tokenizer_json: the tokenizer as JSON of the `tokenizers` library.
            id_to_token: function that returns a token in the vocabulary's representation; None for an unknown id.
            decode: function that returns the text of a single token.
        """
        parts = json.loads(tokenizer_json)
        kinds = _decoder_kinds(parts.get("decoder"))
        self._id_to_token = id_to_token
        self._decode = decode
        self._added = frozenset(token["id"] for token in parts.get("added_tokens") or ())
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace"}) and not self._is_byte_level

    def __call__(self, token_id: int) -> bytes:
        """Return a token's bytes; b"" for an unknown id."""
        token = self._id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level and _BYTE_OF.keys() >= set(token):  # other tokens are encoded below
            return bytes([_BYTE_OF[character] for character in token])
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if self._marks_spaces:
            return token.replace(_SPACE_MARK, " ").encode()
        return self._decode(token_id).encode()


def _decoder_kinds(decoder: Any) -> frozenset[str]:
    """Return the type names of a decoder and of its inner decoders."""
    if not isinstance(decoder, dict):
        return frozenset()
    inner = [_decoder_kinds(part) for part in decoder.get("decoders") or ()]
    return frozenset({str(decoder.get("type"))}).union(*inner)


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's mapping).

    Printable bytes are represented by themselves, and all other bytes by the characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_characters()
