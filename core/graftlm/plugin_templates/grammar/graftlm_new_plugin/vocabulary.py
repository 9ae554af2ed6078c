"""The vocabulary, which maps a token to the bytes that it adds, and a text to the tokens that it may begin with."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import tokenizers
from graftlm.contracts import GrammarContext

__all__ = ["Vocabulary"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The tokens of a vocabulary with their bytes, without special tokens, because these add no text.

    Attributes:
        stop_token_ids: ids of the tokens that end a complete output.
    """

    def __init__(self, context: GrammarContext) -> None:
        self.stop_token_ids = frozenset(context.stop_token_ids)
        parts = json.loads(context.tokenizer_json)
        special = {token["id"] for token in parts.get("added_tokens") or () if token["special"]}
        is_byte_level = "ByteLevel" in json.dumps(parts.get("decoder"))
        vocab = tokenizers.Tokenizer.from_str(context.tokenizer_json).get_vocab(with_added_tokens=True)
        self._bytes = {
            token_id: _byte_level(token) if is_byte_level else _sentence_piece(token)
            for token, token_id in vocab.items()
            if token_id < context.vocab_size and token_id not in special and token_id not in self.stop_token_ids
        }
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        for token_id, text in self._bytes.items():
            self._ids[text].append(token_id)
        self._longest = max(map(len, self._ids), default=0)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; b"" for a special or unknown token."""
        return self._bytes.get(token_id, b"")

    def prefixes_of(self, text: bytes) -> Iterator[int]:
        """Yield every token that a text (UTF-8 bytes) may begin with."""
        for length in range(1, min(len(text), self._longest) + 1):
            yield from self._ids.get(text[:length], ())


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, which writes each byte as a printable character."""
    return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in token)


def _sentence_piece(token: str) -> bytes:
    """Return the bytes of a SentencePiece token, in which <0x0A> is a byte and U+2581 a space."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return character -> byte. Printable bytes have their own characters, other bytes those from U+0100 on."""
    printable = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)]
    others: Any = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = _byte_characters()
