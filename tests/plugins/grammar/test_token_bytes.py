"""The bytes of tokens for each kind of tokenizer."""

import pytest
import tokenizers
from tokenizers import decoders, models

from graftlm_grammar.token_bytes import token_bytes


def tokenizer(vocab, decoder, model=models.WordLevel, **options):
    made = tokenizers.Tokenizer(model(vocab={word: i for i, word in enumerate(vocab)}, **options))
    made.decoder = decoder
    made.add_special_tokens(["<end>"])
    made.add_tokens(["<tool> ▁"])
    return made.to_str()


SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tokenizer(["a", "Ġa", "Ã", "é"], decoders.ByteLevel()), [b"a", b" a", b"\xc3", b"\xe9"]),
        (
            tokenizer(["▁a", "▁▁", "<0xC3>", "é"], SENTENCEPIECE, models.BPE, merges=[], byte_fallback=True),
            [b" a", b"  ", b"\xc3", "é".encode()],
        ),
        (tokenizer(["▁a", "<0xC3>", "b", "c"], decoders.Metaspace()), [b" a", b"<0xC3>", b"b", b"c"]),
        (tokenizer(["a", "##a", "é", "."], decoders.WordPiece(cleanup=False)), [b" a", b"a", " é".encode(), b" ."]),
    ],
)
def test_a_token_has_the_bytes_that_it_adds_to_a_text(text, expected):
    special, added, missing = b"", "<tool> ▁".encode(), b""
    assert token_bytes(text, 7) == [*expected, special, added, missing]
    assert token_bytes(text, 2) == expected[:2]
