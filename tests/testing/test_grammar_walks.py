"""The walker finds each kind of wrong answer of a matcher; the generators make valid vocabularies and grammars."""

import random
import re

import pytest

from graftlm.contracts import GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.testing.ebnf_specs import generate_ebnfs
from graftlm.testing.grammar_walks import Walker
from graftlm.testing.vocabularies import END_TOKEN, generate_tokenizer
from graftlm_grammar.llguidance_backend import LLGuidanceBackend
from graftlm_grammar.options import LLGuidanceOptions

SIZE = 600


@pytest.fixture(scope="module")
def tokenizer():
    return generate_tokenizer(SIZE)


@pytest.fixture(scope="module")
def walker(tokenizer):
    return Walker(tokenizer, SIZE, (tokenizer.token_to_id(END_TOKEN),))


@pytest.fixture(scope="module")
def compiled(tokenizer):
    context = GrammarContext(tokenizer.to_str(), SIZE, (tokenizer.token_to_id(END_TOKEN),))
    spec = GrammarSpec(GrammarKind.REGEX, "[a-z ]{2,30}: (true|tree)[0-9]{1,3}")
    return LLGuidanceBackend(LLGuidanceOptions(), context).compile(spec)


class ChangedMatcher(GrammarMatcher):
    """A matcher with some wrong answers."""

    def __init__(self, matcher):
        self.matcher = matcher

    def accept(self, token_id):
        return self.matcher.accept(token_id)

    def rollback(self, num_tokens):
        self.matcher.rollback(num_tokens)

    def fill_bitmask(self, mask, row):
        self.matcher.fill_bitmask(mask, row)

    def forced_text(self):
        return self.matcher.forced_text()

    def forced_tokens(self):
        return self.matcher.forced_tokens()

    @property
    def finished(self):
        return self.matcher.finished


class RejectsVowels(ChangedMatcher):
    def accept(self, token_id):
        return token_id not in set(b"aeiou") and super().accept(token_id)


class HidesDigits(ChangedMatcher):
    def fill_bitmask(self, mask, row):
        super().fill_bitmask(mask, row)
        mask[row, 1] &= 0xFFFF  # the bytes 0x30 to 0x3f


class AllowsNothing(ChangedMatcher):
    def fill_bitmask(self, mask, row):
        mask[row] = 0


class SetsBitsPastTheEnd(ChangedMatcher):
    def fill_bitmask(self, mask, row):
        super().fill_bitmask(mask, row)
        mask[row, -1] |= -(1 << 30)


class ForcesAToken(ChangedMatcher):
    def forced_tokens(self):
        return [ord("q")]


class ForcesAText(ChangedMatcher):
    def forced_text(self):
        return "tr"


class StaysFinished(ChangedMatcher):
    def fill_bitmask(self, mask, row):
        super().fill_bitmask(mask, row)
        mask[row, 3] |= 1 if self.finished else 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (RejectsVowels, "allowed but rejected"),
        (HidesDigits, "accepted but not allowed"),
        (AllowsNothing, "no token is allowed"),
        (SetsBitsPastTheEnd, "bits past the vocabulary"),
        (ForcesAToken, "is forced"),
        (ForcesAText, "'tr' is forced"),
        (StaysFinished, "a finished matcher allows"),
    ],
)
def test_each_wrong_answer_is_found(walker, compiled, changed, said):
    walks = [walker.walk(changed(compiled.matcher()), random.Random(seed), 60) for seed in range(12)]
    assert any(said in complaint for walk in walks for complaint in walk.complaints)


def test_a_correct_matcher_causes_no_complaint(walker, compiled):
    walks = [walker.walk(ChangedMatcher(compiled.matcher()), random.Random(seed), 60) for seed in range(12)]
    assert not any(walk.complaints for walk in walks)
    finished = [walk.text for walk in walks if walk.is_finished]
    assert len(finished) > 6
    assert all(re.fullmatch("[a-z ]{2,30}: (true|tree)[0-9]{1,3}", text) for text in finished)


def test_a_vocabulary_has_the_requested_size_and_all_bytes_and_depends_only_on_the_seed():
    vocab = generate_tokenizer(3000).get_vocab(with_added_tokens=True)
    assert sorted(vocab.values()) == list(range(3000))
    assert vocab == generate_tokenizer.__wrapped__(3000).get_vocab(with_added_tokens=True)
    assert vocab != generate_tokenizer(3000, seed=1).get_vocab(with_added_tokens=True)
    text = "".join(map(chr, range(0x500))) + "数🙂"
    tokenizer = generate_tokenizer(3000)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match="expected a size of at least 259, got 258"):
        generate_tokenizer(258)


def test_generated_grammars_match_walked_texts_and_few_others(tokenizer, walker):
    context = GrammarContext(tokenizer.to_str(), SIZE, (tokenizer.token_to_id(END_TOKEN),))
    backend, num_finished, num_other = LLGuidanceBackend(LLGuidanceOptions(), context), 0, 0
    for grammar in generate_ebnfs(20, seed=5):
        compiled = backend.compile(GrammarSpec(GrammarKind.EBNF, grammar.text))
        walk = walker.walk(compiled.matcher(), random.Random(1), 100)
        if walk.is_finished:
            assert grammar.matches(walk.text), grammar.text
            num_finished += 1
            num_other += grammar.matches(walk.text[:-1] + "\0\0")
    assert num_finished > 8
    assert num_other < num_finished / 2
