"""Finds the bytes that each token of a Hugging Face tokenizer adds to a text."""

import json
import re
from functools import cache
from typing import Any, Final

import tokenizers

__all__ = ["token_bytes"]

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK: Final = "▁"  # SentencePiece's character for a space


def token_bytes(tokenizer_json: str, vocab_size: int) -> list[bytes]:
    """Return the bytes of tokens 0 to V - 1. Special tokens and ids without a token have b"".

    The decoder determines which of three kinds the tokenizer has: byte-level (GPT-2), SentencePiece, or another. In
    SentencePiece, U+2581 represents a space, and `<0x..>` may represent a byte. For other tokenizers, a token's bytes
    are the text that it adds after a token.

    Args:
        tokenizer_json: the tokenizer, serialized by the `tokenizers` library.
        vocab_size: V; may be larger or smaller than the tokenizer's vocabulary.
    """
    core = tokenizers.Tokenizer.from_str(tokenizer_json)
    description = json.loads(tokenizer_json)
    kinds = _step_kinds(description.get("decoder"))
    added = core.get_added_tokens_decoder()
    found = [b""] * vocab_size
    for token, token_id in core.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            continue
        if token_id in added:
            found[token_id] = b"" if added[token_id].special else added[token_id].content.encode()
        elif "ByteLevel" in kinds:
            found[token_id] = _of_byte_level(token)
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            found[token_id] = _of_sentencepiece(token, has_bytes=bool(description["model"].get("byte_fallback")))
        else:
            found[token_id] = _added_text(core, token_id).encode()
    return found


def _step_kinds(decoder: Any) -> set[str]:
    """Return the type of a decoder, and the types of its parts if it is a sequence."""
    if not isinstance(decoder, dict):
        return set()
    return {decoder["type"]}.union(*map(_step_kinds, decoder.get("decoders", ())))


@cache
def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _of_byte_level(token: str) -> bytes:
    byte_of_char = _byte_of_char()
    if all(char in byte_of_char for char in token):
        return bytes(byte_of_char[char] for char in token)
    return token.encode()


def _of_sentencepiece(token: str, has_bytes: bool) -> bytes:
    byte = _BYTE_FALLBACK.fullmatch(token) if has_bytes else None
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(_BLANK, " ").encode()


def _added_text(core: tokenizers.Tokenizer, token_id: int) -> str:
    """Return a token's text within a longer text.

    The token is decoded after a copy of itself, because a decoder may remove a space or a prefix at a text's start.
    """
    alone, twice = core.decode([token_id]), core.decode([token_id, token_id])
    return str(twice[len(alone) :])
