import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.tokenization import Detokenizer

settings.register_profile("detokenizer", deadline=None, max_examples=150)
pushes = st.lists(st.lists(st.integers(0, 340), max_size=6), max_size=25)
#: Tokens of the byte-piece vocabulary: bytes of longer characters, invalid bytes, and pieces across characters.
CUT_BYTES = [0x61, 0x80, 0x98, 0x9F, 0xA0, 0xBD, 0xBF, 0xC3, 0xE4, 0xEF, 0xF0, 0xFF, *range(256, 265)]
words = st.lists(st.sampled_from(["a", " ", "  b", "é", "你好", "😀", "ab", "h\n"]), max_size=12).map("".join)


def _stream(tokenizer, pushes, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [detokenizer.push(ids) for ids in pushes] + [detokenizer.finish()]


def _byte(byte):
    return 3 + byte  # its token in the byte-fallback vocabulary


@pytest.mark.parametrize("skip", [True, False])
@settings(settings.get_profile("detokenizer"))
@given(pushes=pushes)
def test_streamed_text_of_any_byte_level_tokens_equals_their_decoding(byte_level, skip, pushes):
    ids = [token for push in pushes for token in push]
    assert "".join(_stream(byte_level, pushes, skip)) == byte_level.decode(ids, skip)


@settings(settings.get_profile("detokenizer"))
@given(
    ids=st.lists(st.sampled_from(CUT_BYTES), min_size=1, max_size=3).flatmap(lambda few: st.lists(st.sampled_from(few)))
)
def test_streamed_text_of_tokens_that_cut_characters_equals_their_decoding(byte_pieces, ids):
    assert "".join(_stream(byte_pieces, [[i] for i in ids])) == byte_pieces.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
@settings(settings.get_profile("detokenizer"))
@given(text=words, specials=st.lists(st.integers(0, 12), max_size=3))
def test_streamed_text_of_any_byte_fallback_tokens_equals_their_decoding(byte_fallback, skip, text, specials):
    ids = byte_fallback.encode(text).tolist()
    for place in specials:
        ids.insert(place, 2)
    if skip or not specials:  # a special token in the text may be inside a character
        assert "".join(_stream(byte_fallback, [[i] for i in ids], skip)) == byte_fallback.decode(ids, skip)


def test_a_character_is_emitted_when_it_is_complete(byte_fallback):
    a = byte_fallback.encode("a").tolist()
    pieces = _stream(byte_fallback, [a, [_byte(0xE4)], [_byte(0xBD)], [_byte(0xA0)], [_byte(0xC3), _byte(0xA9)]])
    assert pieces == ["a", "", "", "你", "é", ""]


def test_spaces_between_words_are_kept_and_the_first_is_dropped(byte_fallback):
    ids = byte_fallback.encode("a b ab").tolist()
    assert _stream(byte_fallback, [[i] for i in ids]) == ["a", " b", " ab", ""]


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([0xE4, 0xBD, 0xA0, 0xFF, "a", "b"], "你\ufffdab"),
        ([0xFF, 0xE4, "a"], "\ufffd\ufffda"),
        ([0xE4, 0xBD], "\ufffd\ufffd"),
        ([0xC3, 0xA9, 0xE4], "é\ufffd"),
    ],
)
def test_emitted_text_is_kept_when_later_bytes_make_a_run_invalid(byte_fallback, tokens, shown):
    letters = {letter: 260 + i for i, letter in enumerate("abcdefgh")}
    ids = [letters[token] if isinstance(token, str) else _byte(token) for token in tokens]
    assert "".join(_stream(byte_fallback, [[i] for i in ids])) == shown


class CountingTokenizer:
    """Counts the decoded tokens."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def is_special(self, token_id):
        return self.tokenizer.is_special(token_id)

    def is_known(self, token_id):
        return self.tokenizer.is_known(token_id)


@pytest.mark.parametrize("text", ["\ufffd", "</s>", "hello ", "😀"])
def test_the_work_per_token_does_not_grow_with_the_text(byte_level, text):
    counting = CountingTokenizer(byte_level)
    ids = byte_level.encode(text, False).tolist() * 500
    pieces = _stream(counting, [[i] for i in ids])
    assert "".join(pieces) == byte_level.decode(ids)
    assert counting.num_decoded <= 40 * len(ids)


def test_replacement_characters_are_emitted_before_the_end(byte_level):
    ids = byte_level.encode("\ufffd", False).tolist() * 100
    *pieces, rest = _stream(byte_level, [[i] for i in ids])
    assert len("".join(pieces)) >= 90
    assert len(rest) < 10
