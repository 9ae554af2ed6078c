"""Grammars that wait for the end of the reasoning are compared with rules on the text so far."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm.errors import SamplingParamsError
from graftlm.grammar.delayed_grammar import (
    DelayedGrammar,
    Reasoning,
    ReasoningTokens,
    TextTokens,
    check_reasoning,
    fill_bitmasks,
    matcher_behind,
)
from graftlm.tokenization import Tokenizer
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

MERGES = ["</", "<t", "th", "k>", "k>Ċ", "k>ĊĊ", "k>a", "ĊĊ", "Ċa", "ĊĊĊ", "aa", "ab", ">Ċ", "><", "ak>a"]
THINK = "<think>"
STOP = "<stop>"


def make_tokenizer(*added):
    """Return a tokenizer of bytes, of some longer tokens, and of added tokens."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    vocab = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocab |= {token: 256 + i for i, token in enumerate(MERGES)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([STOP])
    core.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core))


class Rig:
    """A regular expression that waits for `</think>`."""

    def __init__(self, regex, added=((THINK, False),), end="</think>", begin=None, rows=8):
        self.tokenizer = make_tokenizer(*added)
        self.vocab_size = self.tokenizer.vocab_size + 5  # the model's vocabulary is larger
        self.stop = self.tokenizer.encode(STOP)[0]
        context = GrammarContext(self.tokenizer.to_json(), self.vocab_size, (self.stop,))
        self.backend = XGrammarBackend(XGrammarOptions(), context)
        self.inner = self.backend.compile(GrammarSpec(GrammarKind.REGEX, regex))
        self.end, self.begin = end.encode(), begin
        text_tokens = TextTokens(self.tokenizer, self.vocab_size, (self.stop,))
        check_reasoning(Reasoning(end, begin), self.tokenizer)
        self.grammar = DelayedGrammar(self.inner, ReasoningTokens(Reasoning(end, begin), text_tokens, self.tokenizer))

    def bits(self, matcher):
        mask = np.full((3, -(-self.vocab_size // 32)), 0x5A5A5A5A, dtype=np.int32)
        matcher.fill_bitmask(mask, 1)
        assert (mask[[0, 2]] == 0x5A5A5A5A).all()
        return mask[1]

    def allowed(self, matcher):
        return np.flatnonzero(np.unpackbits(self.bits(matcher).view(np.uint8), bitorder="little")).tolist()

    def text_of(self, token_id):
        known = token_id < self.tokenizer.vocab_size and not self.tokenizer.is_special(token_id)
        return self.tokenizer.token_bytes(token_id) if known else b""

    def expected(self, token_ids):
        """Return the allowed continuations of some tokens, computed only from their text."""
        text = b"".join(map(self.text_of, token_ids))
        begin_id = None if self.begin is None else self.tokenizer.token_of(self.begin)
        if begin_id not in (None, *token_ids[:1]):
            return sorted({*self.held(text), *(() if token_ids else (begin_id,))})
        text = text[len(self.begin or "") :]
        if self.end not in text:
            ids = range(self.vocab_size)
            return [i for i in ids if self.text_of(i) and self.goes_on(text + self.text_of(i))]
        rest = text.partition(self.end)[2]
        num_left = 2 - (len(rest[:2]) - len(rest[:2].lstrip(b"\n")))
        if not num_left or rest.lstrip(b"\n"):
            return self.held(rest[:2].lstrip(b"\n") + rest[2:])
        line_ends = [i for i in range(self.vocab_size) if self.text_of(i) in (b"\n", b"\n\n")[:num_left]]
        return sorted([i for i in self.held(b"") if not self.text_of(i).startswith(b"\n")] + line_ends)

    def goes_on(self, text):
        """Return whether text that starts within the reasoning is still there, or has only line ends after its end."""
        _, end, rest = text.partition(self.end)
        return not end or rest in (b"", b"\n", b"\n\n")

    def held(self, text):
        matcher = self.inner.matcher()
        assert all(matcher.accept(byte if byte < 256 else 0) for byte in self.as_ids(text)), text
        return self.allowed(matcher)

    def as_ids(self, text):
        by_text = {self.text_of(i): i for i in range(256)}
        return [by_text[bytes([byte])] for byte in text]


CASES = {
    "open": {"regex": "[ab]{2,4}"},
    "line ends in the grammar": {"regex": "\n*[ab]{2}"},
    "one token": {"regex": "[ab<]{2}", "added": ((THINK, False), ("</think>", False))},
    "the model decides": {"regex": "[ab<]{1,3}", "begin": THINK},
    "the grammar has the tag": {"regex": "(<think>|a)b", "begin": THINK},
    "an end with borders": {"regex": "[ab]{2}", "end": "aaba"},
    "an end of one letter": {"regex": "[ab]{2}", "end": "a"},
    "not ascii": {"regex": "é+", "end": "é🙂é"},
}


@pytest.mark.few(seed=3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_a_matcher_allows_the_same_as_the_text_rules_and_rolls_back(case, seed):
    rig = Rig(**CASES[case])
    draw = random.Random(seed)
    matcher, taken = rig.grammar.matcher(), []
    end_ids = rig.as_ids(rig.end)
    for _ in range(60):
        allowed = rig.allowed(matcher)
        assert allowed == rig.expected(taken), bytes(b"".join(map(rig.text_of, taken)))
        assert (matcher.forced_text() == "") or len(taken) > 0
        for refused in draw.sample(sorted(set(range(rig.vocab_size)) - set(allowed)), 5):
            assert not matcher.accept(refused)
        if draw.random() < 0.25 and taken:
            num = draw.randint(1, len(taken))
            matcher.rollback(num)
            del taken[-num:]
            continue
        text = b"".join(map(rig.text_of, taken))
        wanted = [i for i in (*end_ids[len(text) % len(end_ids) :][:1], *rig.as_ids(b"\nab<")) if i in allowed]
        token_id = draw.choice(wanted) if wanted and draw.random() < 0.7 else draw.choice(allowed)
        assert matcher.accept(token_id)
        taken.append(token_id)
        assert matcher.finished == (token_id == rig.stop)
        if matcher.finished:
            matcher.rollback(1)
            taken.pop()
            assert not matcher.finished


def spell(rig, matcher, text):
    assert all(matcher.accept(token_id) for token_id in rig.as_ids(text.encode()))


def test_an_output_does_not_end_before_the_answer():
    rig = Rig("[ab]{2}")
    matcher = rig.grammar.matcher()
    for text in ("So ", "</think", ">", "\n", "a"):
        assert rig.stop not in rig.allowed(matcher)
        assert not matcher.accept(rig.stop)
        spell(rig, matcher, text)
    spell(rig, matcher, "b")
    assert rig.allowed(matcher) == [rig.stop]
    assert matcher.accept(rig.stop)
    assert matcher.finished


def test_forced_text_is_reported_only_after_the_reasoning():
    rig = Rig("abbbb")
    matcher = rig.grammar.matcher()
    spell(rig, matcher, "abbbb</think>")
    assert (matcher.forced_text(), matcher.forced_tokens()) == ("", ())
    spell(rig, matcher, "\n\n")
    assert matcher.forced_text() == "abbbb"
    matcher.rollback(1)
    assert matcher.forced_text() == ""
    spell(rig, matcher, "a")  # a single line end is enough
    assert matcher.forced_text() == "bbbb"
    assert list(matcher.forced_tokens())


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_many_matchers_equal_the_single_masks(seed):
    rig = Rig("[ab]{2,9}")
    texts = ["", "So", "</thi", "</think>", "</think>\n", "</think>\n\n", "</think>ab", "</think>\n\nab"]
    matchers = []
    for text in random.Random(seed).choices(texts, k=5):
        matchers.append(rig.grammar.matcher())
        spell(rig, matchers[-1], text)
    matchers.insert(seed % 5, rig.inner.matcher())
    mask = np.full((len(matchers), -(-rig.vocab_size // 32)), -1, dtype=np.int32)
    fill_bitmasks(rig.backend.fill_bitmasks, matchers, mask)
    for matcher, row in zip(matchers, mask, strict=True):
        np.testing.assert_array_equal(row, rig.bits(matcher))


@pytest.mark.parametrize("fields", [{"begin": "<thought>"}, {"begin": STOP}, {"added": (("</think>", True),)}])
def test_tags_that_are_not_text_of_the_vocabulary_are_refused(fields):
    with pytest.raises(SamplingParamsError, match=r"^reasoning_(begin|end): .*(single|special) token") as caught:
        Rig("a", **fields)
    assert caught.value.param == ("reasoning_begin" if "begin" in fields else "reasoning_end")


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [("So", "</think>"), ("So</th", "ink>"), ("</think>a<", "/think>"), ("</thi<stop>", "</think>"), ("<", "/think>")],
)
def test_a_prompt_may_contain_the_start_of_the_end_tag(prompt, rest):
    rig = Rig("[ab]{2}")
    matcher = matcher_behind(rig.grammar, rig.tokenizer.encode(prompt).tolist())
    spell(rig, matcher, rest[:-1])
    assert not matcher.accept(rig.stop)
    spell(rig, matcher, rest[-1:] + "ab")
    assert matcher.accept(rig.stop)
    plain = matcher_behind(rig.inner, rig.tokenizer.encode(prompt).tolist())
    spell(rig, plain, "ab")
