import numpy as np
import pytest

from graftlm.tokenization import StopStringWatch, TextStream
from graftlm.types import SamplingParams


def _ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def _tokens_until(tokenizer, ids, text):
    """Return the number of tokens until their text contains `text`."""
    return next(n for n in range(len(ids) + 1) if text in tokenizer.decode(ids[:n]))


def test_without_stop_strings_the_text_is_the_decoding_of_the_tokens(byte_level):
    ids = _ids(byte_level, "hello 你好 😀 world")
    stream = TextStream(byte_level, SamplingParams())
    updates = [stream.push([i]) for i in ids]
    assert "".join(u.text for u in updates) + stream.finish() == "hello 你好 😀 world"
    assert all(u.num_tokens == 1 and u.matched is None for u in updates)


@pytest.mark.parametrize("piece_len", [1, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "hello "), (True, "hello wor")])
def test_a_stop_string_across_tokens_ends_the_text_and_the_tokens_are_counted(byte_level, piece_len, include, text):
    ids = _ids(byte_level, "hello world, the quick brown fox")
    stream = TextStream(byte_level, SamplingParams(stop="wor", include_stop=include))
    shown, taken = "", 0
    for start in range(0, len(ids), piece_len):
        update = stream.push(ids[start : start + piece_len])
        shown += update.text
        taken += update.num_tokens
        if update.matched is not None:
            break
    assert (shown, update.matched, stream.matched) == (text, "wor", "wor")
    assert taken == _tokens_until(byte_level, ids, "wor")


def test_tokens_after_a_match_are_ignored(byte_level):
    stream = TextStream(byte_level, SamplingParams(stop="wor"))
    stream.push(_ids(byte_level, "hello world"))
    after = stream.push(_ids(byte_level, "more"))
    assert (after.text, after.matched, after.num_tokens) == ("", "wor", 0)
    assert stream.finish() == ""


def test_text_that_may_begin_a_stop_string_is_emitted_at_the_end(byte_level):
    stream = TextStream(byte_level, SamplingParams(stop="fox trot"))
    ids = _ids(byte_level, "brown fox")
    shown = "".join(stream.push([i]).text for i in ids)
    assert shown == "brown "
    assert stream.finish() == "fox"


def test_bytes_of_an_incomplete_character_are_emitted_at_the_end_and_may_complete_a_stop_string(byte_level):
    ids = _ids(byte_level, "a 😁")[:-1]
    cut = byte_level.decode(ids)
    assert cut.endswith("\ufffd")
    plain = TextStream(byte_level, SamplingParams())
    assert plain.push(ids).text + plain.finish() == cut
    stopped = TextStream(byte_level, SamplingParams(stop="\ufffd"))
    assert stopped.push(ids).text + stopped.finish() == "a "
    assert stopped.matched == "\ufffd"


@pytest.mark.parametrize(
    ("min_tokens", "text", "matched"), [(0, "", "a"), (1, "", "a"), (2, "a b ", "a"), (6, "a b a", None)]
)
def test_a_stop_string_complete_before_min_tokens_stays_in_the_text(byte_level, min_tokens, text, matched):
    ids = [int(i) for part in ("a", " ", "b", " ", "a") for i in _ids(byte_level, part)]
    assert len(ids) == 5
    stream = TextStream(byte_level, SamplingParams(stop="a", min_tokens=min_tokens))
    assert (stream.push(ids).text + stream.finish(), stream.matched) == (text, matched)


@pytest.mark.parametrize(("skip", "text"), [(True, "hello"), (False, "<s>hello</s>")])
def test_special_tokens_are_emitted_on_request(byte_level, skip, text):
    stream = TextStream(byte_level, SamplingParams(skip_special_tokens=skip))
    ids = np.concatenate([byte_level.encode("hello"), np.array([1], dtype=np.int32)])
    assert stream.push(ids).text + stream.finish() == text


def test_a_watch_returns_the_stop_string_at_the_token_that_completes_it(byte_level):
    ids = _ids(byte_level, "hello world")
    watch = StopStringWatch(byte_level, SamplingParams(stop=["nothing", "wor"]))
    answers = [watch.push([int(i)]) for i in ids]
    last = _tokens_until(byte_level, ids, "wor") - 1
    assert answers[: last + 1] == [None] * last + ["wor"]
