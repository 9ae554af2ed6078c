"""The conformance kit of grammar backends: the fake passes, and each faulty backend fails."""

from typing import ClassVar

import numpy as np
import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.testing import FakeGrammarBackend, GrammarBackendConformance, GrammarCase, fake_grammar
from graftlm.testing.conformance import iter_conformance

CASES = (
    GrammarCase(GrammarKind.EBNF, "xy yz xyz", ("xyx", "xzy"), ("", "x", "xy", "yyx", "xyxy", "abc")),
    GrammarCase(GrammarKind.EBNF, "x y", ("xy",), ("x", "y", "xx")),
)
MALFORMED = tuple(GrammarSpec(kind, "a1") for kind in GrammarKind)


class Kit(GrammarBackendConformance):
    cases: ClassVar = CASES
    malformed: ClassVar = MALFORMED
    matcher_class: ClassVar = fake_grammar._FakeMatcher

    def create(self, context):
        return FakeGrammarBackend.of(context)

    def matcher(self, case):
        matcher = super().matcher(case)
        return self.matcher_class(matcher._backend, matcher._words)


class TestFakeGrammarBackend(Kit):
    pass


class AcceptsAnything(fake_grammar._FakeMatcher):
    def accept(self, token_id):
        self._tokens.append(token_id)
        return True


class AlwaysAllowsStopTokens(fake_grammar._FakeMatcher):
    def _allowed(self):
        return [*super()._allowed(), *self._backend.stop_token_ids]


class NeverFinishes(fake_grammar._FakeMatcher):
    @property
    def finished(self):
        return False


class RollsBackOneLess(fake_grammar._FakeMatcher):
    def rollback(self, num_tokens):
        super().rollback(max(0, num_tokens - 1))


class ClearsAllRows(fake_grammar._FakeMatcher):
    def fill_bitmask(self, mask, row):
        mask[:] = 0
        super().fill_bitmask(mask, row)


class AddsToTheMask(fake_grammar._FakeMatcher):
    def fill_bitmask(self, mask, row):
        before = mask[row].copy()
        super().fill_bitmask(mask, row)
        np.bitwise_or(mask[row], before, out=mask[row])


class KeepsTheMask(fake_grammar._FakeMatcher):
    """Adds the mask that it filled in last to the next mask."""

    last = None

    def fill_bitmask(self, mask, row):
        super().fill_bitmask(mask, row)
        if self.last is not None and mask.shape[0] == 1:
            np.bitwise_or(mask[row], self.last, out=mask[row])
        if mask.shape[0] == 1:
            self.last = mask[row]


class WritesLater(fake_grammar._FakeMatcher):
    last = None

    def fill_bitmask(self, mask, row):
        super().fill_bitmask(mask, row)
        self.last = mask[row]

    def accept(self, token_id):
        if self.last is not None:
            self.last[:] = 0
        return super().accept(token_id)


class AcceptsForcedTokens(fake_grammar._FakeMatcher):
    def forced_tokens(self):
        forced = super().forced_tokens()
        self._tokens += forced
        return forced


class ForcesTooMuch(fake_grammar._FakeMatcher):
    def forced_tokens(self):
        return self._allowed()[:1]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (AcceptsAnything, "test_what_a_matcher_accepts_meets_the_specification"),
        (AcceptsAnything, "test_the_bitmask_says_what_accept_does"),
        (AlwaysAllowsStopTokens, "test_stop_tokens_come_where_a_text_is_complete"),
        (NeverFinishes, "test_what_meets_a_specification_is_accepted_however_it_is_tokenised"),
        (RollsBackOneLess, "test_rollback_undoes"),
        (ClearsAllRows, "test_fill_bitmask_writes_one_row"),
        (AddsToTheMask, "test_fill_bitmask_writes_one_row"),
        (KeepsTheMask, "test_masks_belong_to_the_caller"),
        (WritesLater, "test_masks_belong_to_the_caller"),
        (RollsBackOneLess, "test_rollback_undoes_forced_tokens"),
        (AcceptsForcedTokens, "test_asking_changes_nothing"),
        (ForcesTooMuch, "test_what_is_forced_must_come"),
    ],
)
def test_a_faulty_matcher_is_found(broken, sentence):
    class Broken(Kit):
        matcher_class: ClassVar = broken

    assert fails(Broken, sentence)


class SharesItsMatcher(FakeGrammarBackend):
    def compile(self, spec):
        compiled = super().compile(spec)
        matcher = compiled.matcher()
        compiled.matcher = lambda: matcher
        return compiled


class MixesRows(FakeGrammarBackend):
    def fill_bitmasks(self, matchers, mask):
        super().fill_bitmasks(matchers[::-1], mask)


class ReportsEnforcedParts(FakeGrammarBackend):
    def check(self, spec):
        super().check(spec)
        return ("$.x",)


class NeverRefuses(FakeGrammarBackend):
    def check(self, spec):
        pass


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (SharesItsMatcher, "test_matchers_know_nothing_of_each_other"),
        (MixesRows, "test_fill_bitmasks_writes_what_each_matcher_allows"),
        (ReportsEnforcedParts, "test_what_is_not_enforced_is_named"),
        (NeverRefuses, "test_what_is_malformed_is_refused"),
    ],
)
def test_a_faulty_backend_is_found(broken, sentence):
    class Broken(GrammarBackendConformance):
        cases: ClassVar = CASES
        malformed: ClassVar = MALFORMED

        def create(self, context):
            return broken.of(context)

    assert fails(Broken, sentence)


def fails(kit, test):
    """Return whether a test of a kit fails, without running those after it."""
    return any(result.error and result.name.partition("[")[0] == test for result in iter_conformance(kit))
