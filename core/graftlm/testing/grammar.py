"""The conformance kit of grammar backends."""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from graftlm.contracts import GrammarBackend, GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.errors import GrammarError
from graftlm.testing.conformance import Conformance
from graftlm.testing.grammar_walks import Walker
from graftlm.testing.vocabularies import END_TOKEN, generate_tokenizer

__all__ = ["GrammarBackendConformance", "GrammarCase"]

_WALK_VOCAB_SIZE = 8000
_WALK_TOKENS = 150
_VOCAB_SIZE = 300  # not a multiple of 32, and larger than the tokenizer's vocabulary
_MERGES = ['{"', '":', "tr", "ue", "true", "nu", "ll", "null", "ab", '"}', "12", "ÃŁ", "]}", "Ġ{"]


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """A specification, with texts that meet the specification and texts that violate it.

    Attributes:
        kind: kind of the specification.
        text: text of the specification.
        accepted: texts that meet the specification.
        rejected: texts that violate the specification.
        unenforced: parts of the specification that the backend cannot enforce, as returned by `check`. If there are
            such parts, `spec` is not strict, and the backend must refuse a strict specification of the same text.
    """

    kind: GrammarKind
    text: str
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    unenforced: tuple[str, ...] = ()

    @property
    def spec(self) -> GrammarSpec:
        """The specification."""
        return GrammarSpec(self.kind, self.text, strict=not self.unenforced)

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.text}"


_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["x"]}
_TAGS = {
    "triggers": ["<t:"],
    "structures": [
        {"begin": "<t:n>", "schema": {"type": "integer"}, "end": "</t>"},
        {"begin": "<t:r>", "regex": "(ab)+", "end": "]"},
    ],
}

STANDARD_CASES = (
    GrammarCase(GrammarKind.REGEX, "(ab)+c?", ("ab", "ababc"), ("", "a", "abca", "c")),
    GrammarCase(GrammarKind.REGEX, "[^a]*", ("", "true]}"), ("a", "12a")),
    GrammarCase(GrammarKind.REGEX, "[0-9]{2}-ß", ("12-ß",), ("1-ß", "12-s", "123-ß")),
    GrammarCase(GrammarKind.JSON_SCHEMA, json.dumps(_POINT), ('{"x": 12}', '{"x":1, "ok":true}'), ("{}", '{"x":"a"}')),
    GrammarCase(GrammarKind.JSON_SCHEMA, '{"enum": ["ab", null]}', ('"ab"', "null"), ('"a"', "true")),
    GrammarCase(GrammarKind.EBNF, 'root ::= "ab" tail\ntail ::= "c" | "d" tail', ("abc", "abddc"), ("ab", "abdd")),
    GrammarCase(GrammarKind.CHOICE, '["ab", "abc", "ß\\"\\n"]', ("ab", "abc", 'ß"\n'), ("", "a", "abcd", "abab")),
    GrammarCase(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps({**_TAGS, "stop_after_first": False}),
        ("", "a<b", "<t", "12<t:n>12</t> ab<t:r>ab]<t:n>1</t>"),
        ("<t:", "<t:n>1", "<t:n>a</t>", "<t:x", "a<t:r>a]", "<t:n>1</t><t:n>ab</t>"),
    ),
    GrammarCase(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps({**_TAGS, "at_least_one": True, "stop_after_first": True}),
        ("<t:n>12</t>", "<t:r>ab]"),
        ("", "a", "ab<t:r>ab]", "<t:r>ab]a"),
    ),
    # Backends enforce different keywords. This case is for backends that do not enforce uniqueItems.
    GrammarCase(
        GrammarKind.JSON_SCHEMA,
        '{"type": "array", "items": {"enum": [12]}, "uniqueItems": true}',
        ("[12]", "[12,12]"),
        ("12", "[true]"),
        ("$.uniqueItems",),
    ),
)
STANDARD_MALFORMED = (
    GrammarSpec(GrammarKind.REGEX, "(ab"),
    GrammarSpec(GrammarKind.REGEX, "[z-a]"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, "{"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "text"}'),
    GrammarSpec(GrammarKind.JSON_SCHEMA, "[" * 100_000),
    GrammarSpec(GrammarKind.EBNF, "root ::= missing"),
    GrammarSpec(GrammarKind.EBNF, ""),
    GrammarSpec(GrammarKind.CHOICE, "[]"),
    GrammarSpec(GrammarKind.CHOICE, '["a", 1]'),
    GrammarSpec(GrammarKind.CHOICE, '"ab"'),
    GrammarSpec(GrammarKind.STRUCTURAL_TAG, "{}"),
    GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({**_TAGS, "triggers": []})),
    GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({**_TAGS, "triggers": ["<u:"]})),
    GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "text"}', strict=False),
)
_WALK_SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["é\n", "数", None, 1.5]},
        "text": {"type": "string", "minLength": 140},
        "all": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["größe", "text", "all"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": -12, "maximum": 1200}},
}
_WALK_TAGS = {
    "triggers": ["<a", "["],
    "structures": [
        {"begin": "<a>", "schema": {"type": "string", "maxLength": 200}, "end": "</a>"},
        {"begin": "[é", "regex": "[^ae]{10,200}z", "end": "]"},
    ],
    "at_least_one": True,
}
STANDARD_WALKS = (
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_WALK_SCHEMA)),
    GrammarSpec(GrammarKind.REGEX, "x[^ae]{10,200}y|(?:é|数字)+[0-9]{2,}"),
    GrammarSpec(GrammarKind.EBNF, 'root ::= "(" root* ")" | [^()é]{130,} "é" | a\na ::= [a-zé]{20,150} "," a | "."'),
    GrammarSpec(GrammarKind.CHOICE, json.dumps(["red", "reddish", "grün und blau", "数字"])),
    GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(_WALK_TAGS)),
)


class GrammarBackendConformance(Conformance, ABC):
    """The kit for the contracts in `graftlm.contracts.grammar`.

        class TestMyBackend(GrammarBackendConformance):
            def create(self, context):
                return MyBackend(context)

    Attributes:
        cases: specifications with texts. Override this for a backend that does not support all kinds of specifications.
        malformed: specifications that the backend must refuse.
        walks: specifications for random walks with a vocabulary of 8,000 tokens, in addition to those of `cases`. A
            backend may refuse specifications of `walks`.
    """

    cases: ClassVar[Sequence[GrammarCase]] = STANDARD_CASES
    malformed: ClassVar[Sequence[GrammarSpec]] = STANDARD_MALFORMED
    walks: ClassVar[Sequence[GrammarSpec]] = STANDARD_WALKS
    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"seed": (0, 1)}

    @abstractmethod
    def create(self, context: GrammarContext) -> GrammarBackend:
        """Return a new backend for a tokenizer."""

    @cached_property
    def backend(self) -> GrammarBackend:
        """The backend of a test, created at its first use."""
        tokenizer = _tokenizer()
        return self.create(GrammarContext(tokenizer.to_str(), _VOCAB_SIZE, (_end(),)))

    def matcher(self, case: GrammarCase) -> GrammarMatcher:
        """Return a new matcher of a case."""
        return self.backend.compile(case.spec).matcher()

    def test_what_meets_a_specification_is_accepted_however_it_is_tokenised(self) -> None:
        """A matcher accepts a text that meets the specification, then a stop token, and is then finished."""
        for case, text, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in token_ids:
                assert not matcher.finished
                assert matcher.accept(token_id), f"{case}: {text!r} is rejected"
            assert matcher.accept(_end()), f"{case}: the stop token is rejected after {text!r}"
            assert matcher.finished

    def test_what_a_matcher_accepts_meets_the_specification(self) -> None:
        """If a matcher accepts a text and then a stop token, the text meets the specification."""
        for case, text, token_ids in self._tokenised("rejected"):
            matcher = self.matcher(case)
            accepted = all(matcher.accept(token_id) for token_id in [*token_ids, _end()])
            assert not accepted, f"{case}: {text!r} is accepted"

    def test_the_bitmask_says_what_accept_does(self) -> None:
        """`accept` accepts a token if and only if `fill_bitmask` sets its bit."""
        for case, _, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in [*token_ids, _end()]:
                allowed = _allowed(matcher)
                for other in range(_VOCAB_SIZE):
                    accepted = matcher.accept(other)
                    assert accepted == (other in allowed), f"{case}: the bitmask and accept() differ for token {other}"
                    if accepted:
                        matcher.rollback(1)
                assert _allowed(matcher) == allowed
                matcher.accept(token_id)

    def test_random_walks_find_no_disagreement(self) -> None:
        """After any sequence of tokens, `fill_bitmask`, `accept`, `forced_tokens` and `forced_text` agree."""
        tokenizer = generate_tokenizer(_WALK_VOCAB_SIZE)
        end = tokenizer.get_vocab(with_added_tokens=True)[END_TOKEN]
        backend = self.create(GrammarContext(tokenizer.to_str(), _WALK_VOCAB_SIZE, (end,)))
        walker = Walker(tokenizer, _WALK_VOCAB_SIZE, (end,))
        for i, spec in enumerate([*(case.spec for case in self.cases), *self.walks]):
            try:
                compiled = backend.compile(spec)
            except GrammarError:
                assert i >= len(self.cases), f"{spec} is refused"
                continue
            for seed in range(2):
                walk = walker.walk(compiled.matcher(), random.Random(f"{seed} {i}"), _WALK_TOKENS)
                assert not walk.complaints, f"{spec}: after {walk.text!r}: {walk.complaints[0]}"

    def test_stop_tokens_come_where_a_text_is_complete(self) -> None:
        """Stop tokens are allowed if and only if the output so far is complete."""
        for case, text, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for num, token_id in enumerate(token_ids):
                so_far = _tokenizer().decode(token_ids[:num])
                if so_far in case.rejected:
                    assert _end() not in _allowed(matcher), f"{case}: the stop token is allowed after {so_far!r}"
                matcher.accept(token_id)
            assert _end() in _allowed(matcher), f"{case}: the stop token is not allowed after {text!r}"

    def test_a_finished_matcher_allows_nothing(self) -> None:
        """After a stop token, the matcher is finished and allows no more tokens."""
        for case, _, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in [*token_ids, _end()]:
                matcher.accept(token_id)
            assert _allowed(matcher) == set()
            assert not matcher.accept(_end())
            assert (matcher.forced_text(), list(matcher.forced_tokens())) == ("", [])

    def test_special_tokens_are_not_text(self) -> None:
        """No grammar allows special tokens, except stop tokens."""
        pad = _id_of("<pad>")
        for case, _, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in token_ids:
                assert pad not in _allowed(matcher)
                matcher.accept(token_id)

    def test_rollback_undoes(self, seed: int) -> None:
        """`rollback(n)` restores the state before the last n accepted tokens, which may include a stop token."""
        draw = random.Random(seed)
        for case, _, token_ids in self._tokenised("accepted"):
            matcher, path, answers = self.matcher(case), [*token_ids, _end()], []
            for token_id in path:
                answers.append(_answers(matcher))
                matcher.accept(token_id)
            place = len(path)
            for _ in range(20):
                num = draw.randint(0, place)
                matcher.rollback(num)
                place -= num
                if place < len(path):
                    assert _answers(matcher) == answers[place], f"{case}: after a rollback of {num} to token {place}"
                goal = draw.randint(place, len(path))
                assert all(matcher.accept(token_id) for token_id in path[place:goal])
                place = goal

    def test_fill_bitmask_writes_one_row(self) -> None:
        """`fill_bitmask` overwrites all of mask[row], changes no other row, and clears the bits from V on."""
        for case in self.cases:
            matcher = self.matcher(case)
            mask = np.full((3, -(-_VOCAB_SIZE // 32)), 0x55555555, dtype=np.int32)
            matcher.fill_bitmask(mask, 1)
            assert (mask[[0, 2]] == 0x55555555).all(), "another row was changed"
            assert _tokens_in(mask[1]) == _allowed(matcher)

    def test_masks_belong_to_the_caller(self) -> None:
        """A caller may change a mask that was filled: later masks are the same, and no matcher writes to it again."""
        for case, _, token_ids in self._tokenised("accepted"):
            alone, matcher, filled = self.matcher(case), self.matcher(case), []
            for token_id in token_ids:
                mask = np.zeros((1, -(-_VOCAB_SIZE // 32)), dtype=np.int32)
                matcher.fill_bitmask(mask, 0)
                assert _tokens_in(mask[0]) == _allowed(alone), f"{case}: a mask depends on a mask filled before"
                np.invert(mask, out=mask)
                filled.append((mask, mask.copy()))
                assert matcher.accept(token_id) == alone.accept(token_id)
            for mask, copy in filled:
                assert np.array_equal(mask, copy), f"{case}: a mask was changed after fill_bitmask() returned"

    def test_fill_bitmasks_writes_what_each_matcher_allows(self) -> None:
        """`fill_bitmasks` writes to mask[i] the same as `fill_bitmask` of matchers[i], also for finished matchers."""
        matchers = []
        for case, _, token_ids in self._tokenised("accepted"):
            for length in range(len(token_ids) + 2):
                matchers.append(self.matcher(case))
                for token_id in [*token_ids, _end()][:length]:
                    matchers[-1].accept(token_id)
        mask = np.full((len(matchers), -(-_VOCAB_SIZE // 32)), 0x55555555, dtype=np.int32)
        self.backend.fill_bitmasks(matchers, mask)
        for row, matcher in zip(mask, matchers, strict=True):
            assert _tokens_in(row) == _allowed(matcher)

    def test_rollback_undoes_forced_tokens(self) -> None:
        """`rollback(n)` also restores the state before n accepted tokens that `forced_tokens` returned."""
        for case, _, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in token_ids:
                before, forced = _answers(matcher), matcher.forced_tokens()
                assert all(matcher.accept(forced_id) for forced_id in forced)
                for num_left in reversed(range(len(forced))):
                    matcher.rollback(1)
                    assert list(matcher.forced_tokens())[:1] == list(forced[num_left : num_left + 1])
                assert _answers(matcher) == before
                matcher.accept(token_id)

    def test_what_is_not_enforced_is_named(self) -> None:
        """`check` returns the parts that are not enforced, or refuses a strict specification."""
        for case in self.cases:
            assert tuple(self.backend.check(case.spec)) == case.unenforced, f"{case}"
            if not case.unenforced:
                continue
            for method in (self.backend.check, self.backend.compile):
                try:
                    method(GrammarSpec(case.kind, case.text))
                except GrammarError:
                    continue
                raise AssertionError(f"{method.__name__}() takes strict {case}, but does not enforce {case.unenforced}")

    def test_asking_changes_nothing(self) -> None:
        """`fill_bitmask`, `forced_text` and `forced_tokens` do not change the state of a matcher."""
        for case, _, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for token_id in token_ids:
                first = _answers(matcher)
                assert _answers(matcher) == first
                matcher.accept(token_id)

    def test_what_is_forced_must_come(self) -> None:
        """Each token of `forced_tokens` is the only one allowed; every accepted text continues with `forced_text`."""
        for case, text, token_ids in self._tokenised("accepted"):
            matcher = self.matcher(case)
            for num, token_id in enumerate(token_ids):
                rest = text[len(_tokenizer().decode(token_ids[:num])) :]
                forced_text = matcher.forced_text()
                assert rest.startswith(forced_text) or "\ufffd" in _tokenizer().decode(token_ids[:num]), (
                    f"{case}: forced_text() is {forced_text!r}, but {rest!r} may follow"
                )
                forced = matcher.forced_tokens()
                for forced_id in forced:
                    assert _allowed(matcher) == {forced_id}
                    matcher.accept(forced_id)
                matcher.rollback(len(forced))
                matcher.accept(token_id)

    def test_matchers_know_nothing_of_each_other(self) -> None:
        """Matchers of one compiled grammar do not affect each other."""
        for case in self.cases:
            compiled = self.backend.compile(case.spec)
            one, other = compiled.matcher(), compiled.matcher()
            before = _answers(other)
            for token_id in [*_tokenizer().encode(case.accepted[0]).ids, _end()]:
                one.accept(token_id)
            assert _answers(other) == before

    def test_what_is_malformed_is_refused(self) -> None:
        """`check` and `compile` raise GrammarError for each malformed specification, and no other error."""
        for spec in self.malformed:
            for method in (self.backend.check, self.backend.compile):
                try:
                    method(spec)
                except GrammarError:
                    continue
                raise AssertionError(f"{method.__name__}() accepts the malformed {spec}")
        for case in self.cases:
            self.backend.check(case.spec)

    def test_compile_may_be_called_from_several_threads(self) -> None:
        """`check` and `compile` may be called from several threads at once."""
        specs = [case.spec for case in self.cases] * 4
        alone = [_answers(self.backend.compile(spec).matcher()) for spec in specs]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda spec: _answers(self.backend.compile(spec).matcher()), specs))
        assert together == alone

    def _tokenised(self, which: str) -> Iterator[tuple[GrammarCase, str, list[int]]]:
        """Yield (case, text, token ids): each text once with the tokenizer's tokens, once with a token per byte.

        Args:
            which: name of the list of texts: "accepted" or "rejected".
        """
        for case in self.cases:
            for text in getattr(case, which):
                yield case, text, _tokenizer().encode(text).ids
                yield case, text, _byte_ids(text)


@cache
def _tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with a few longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys(_MERGES)])}
    merges = [(left, token[len(left) :]) for token in _MERGES for left in [_left_part(token, vocab)]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    return tokenizer


def _left_part(token: str, vocab: Mapping[str, int]) -> str:
    """Return the longest prefix of a token for which both the prefix and the remaining part are in the vocabulary."""
    return next(token[:n] for n in reversed(range(1, len(token))) if token[:n] in vocab and token[n:] in vocab)


def _byte_ids(text: str) -> list[int]:
    """Return the token ids of a text, with one token for each byte of the UTF-8 encoding."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [_id_of(char) for piece, _ in pieces for char in piece]


def _id_of(token: str) -> int:
    return _tokenizer().get_vocab(with_added_tokens=True)[token]


def _end() -> int:
    return _id_of("<end>")


def _tokens_in(bits: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def _allowed(matcher: GrammarMatcher) -> set[int]:
    mask = np.zeros((1, -(-_VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    allowed = _tokens_in(mask[0])
    assert all(token_id < _VOCAB_SIZE for token_id in allowed), "bits past V are set"
    return allowed


def _answers(matcher: GrammarMatcher) -> tuple[object, ...]:
    """Return the results of all methods of a matcher that do not change it."""
    return _allowed(matcher), matcher.forced_text(), tuple(matcher.forced_tokens()), matcher.finished
