"""Generates byte-level vocabularies of any size, for tests of code that depends on the vocabulary."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

__all__ = ["END_TOKEN", "generate_tokenizer"]

#: The stop token. `<pad>` is a special token too; `<tool>` is an added token that is not special.
END_TOKEN: Final = "<end>"
_SPECIAL_TOKENS: Final = (END_TOKEN, "<pad>")
_ADDED_TOKEN: Final = "<tool>"
_NUM_BYTES: Final = 256

_ONSETS: Final = (*"bcdfghjklmnpqrstvwz", "", "br", "ch", "cl", "cr", "pl", "pr", "sh", "st", "str", "th", "tr", "wh")
_NUCLEI: Final = (*"aeiouy", "ai", "ea", "ee", "ie", "oo", "ou")
_CODAS: Final = ("", "", "", "b", "ck", "d", "l", "m", "n", "ng", "nt", "r", "rs", "s", "st", "t", "ly", "ing", "ed")
_PUNCTUATION: Final = "{}[]():;,.\"'\\/<>=+-*&|!?@#$%^~_`"
_JSON: Final = (
    *('{"', '"}', '":', '": ', '":"', '": "', '",', '", "', '","', '"},{"', '"}, {"', '":{"', '":[', '"]', '"]}'),
    *('["', "[]", "{}", "}}", "]]", '":1', '":true', '":null', '\\"', "\\n", "\\u", "\\\\", "},", "],", "true", "null"),
    *("false", "</", "<t", '">', "=>", "->", '"\n', '",\n', "{\n", "}\n", '""', '"""', "...", ".\n"),
)
#: First and last code point of each alphabet. Tokens have one to three of its characters, or end within a character.
_ALPHABETS: Final = (
    *((0xA1, 0xFF), (0x100, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A), (0x905, 0x939)),
    *((0xE01, 0xE30), (0x3041, 0x30FE), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2010, 0x2030), (0x1F300, 0x1F64F)),
)


@cache
def generate_tokenizer(size: int, seed: int = 0) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with `size` random tokens. Equal arguments give equal tokenizers.

    The vocabulary has all single bytes, words with and without a leading space, parts of words, runs of white space,
    numbers, and punctuation of JSON and code. It also has characters and parts of characters of many alphabets. The
    tokenizer has no merges, so it encodes a text with one token for each byte.

    Raises:
        ValueError: `size` is too small for all bytes and the added tokens.
    """
    num_pieces = size - _NUM_BYTES - len(_SPECIAL_TOKENS) - 1
    if num_pieces < 0:
        raise ValueError(f"expected a size of at least {size - num_pieces}, got {size}")
    byte_chars = _byte_chars()
    spelt = [byte_chars[byte] for byte in range(_NUM_BYTES)]
    pieces = itertools.islice(_unique_pieces(Random(f"vocabulary {seed}")), num_pieces)
    spelt += ["".join(byte_chars[byte] for byte in piece) for piece in pieces]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spelt)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.add_tokens([_ADDED_TOKEN])
    return tokenizer


def _byte_chars() -> dict[int, str]:
    """Return byte -> character for this byte in byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(_NUM_BYTES + i) for i, byte in enumerate(others)}


def _unique_pieces(random: Random) -> Iterator[bytes]:
    """Yield an endless sequence of different pieces of at least two bytes."""
    seen: set[bytes] = set()
    for piece in itertools.chain((text.encode() for text in _JSON), _drawn_pieces(random)):
        if len(piece) > 1 and piece not in seen:
            seen.add(piece)
            yield piece


def _drawn_pieces(random: Random) -> Iterator[bytes]:
    draws: tuple[Callable[[Random], bytes], ...] = (_word, _foreign, _code, _number, _blanks)
    while True:
        (draw,) = random.choices(draws, weights=(70, 20, 8, 1.5, 0.5))
        yield draw(random)


def _word(random: Random) -> bytes:
    word = "".join(
        random.choice(part) for _ in range(random.choice((1, 1, 2, 2, 3, 4))) for part in (_ONSETS, _NUCLEI, _CODAS)
    )
    word = random.choice((word, word, word.capitalize(), word.upper() if len(word) < 5 else word))
    return (" " + word if random.random() < 0.6 else word).encode()


def _foreign(random: Random) -> bytes:
    first, last = random.choice(_ALPHABETS)
    text = "".join(chr(random.randint(first, last)) for _ in range(random.choice((1, 1, 2, 2, 3))))
    encoded = (" " + text if random.random() < 0.15 else text).encode()
    if random.random() < 0.1:  # the piece ends or starts within a character
        return encoded[:-1] if random.random() < 0.7 else encoded[1:]
    return encoded


def _code(random: Random) -> bytes:
    text = "".join(random.choices(_PUNCTUATION, k=random.choice((2, 2, 3, 4))))
    return random.choice((text, text, " " + text, text + "\n", text[0] * random.randint(2, 16))).encode()


def _number(random: Random) -> bytes:
    return str(random.randrange(10 ** random.randint(2, 4))).zfill(random.randint(1, 3)).encode()


def _blanks(random: Random) -> bytes:
    return random.choice(
        (" " * random.randint(2, 80), "\n" * random.randint(2, 8), "\t" * random.randint(2, 16))
    ).encode() + (random.choice(("", "", "\n", "\r\n")).encode())
