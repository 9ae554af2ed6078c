"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
import tokenizers
from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm.testing import GrammarBackendConformance, GrammarCase

from graftlm_new_plugin import provide_grammar_backends

(PROVIDER,) = provide_grammar_backends()


class TestContract(GrammarBackendConformance):
    cases = (
        GrammarCase(GrammarKind.CHOICE, '["ab", "abc", "ß\\"\\n"]', ("ab", "abc", 'ß"\n'), ("", "a", "abcd", "abab")),
        GrammarCase(GrammarKind.CHOICE, '["", "true"]', ("", "true"), ("t", "tru", "truetrue")),
        GrammarCase(GrammarKind.CHOICE, '["ä", "ö"]', ("ä", "ö"), ("", "ü")),  # both texts begin with the same byte
    )
    malformed = (
        *(GrammarSpec(kind, "{}") for kind in GrammarKind if kind is not GrammarKind.CHOICE),
        *(
            GrammarSpec(GrammarKind.CHOICE, text)
            for text in ("[]", '["a", 1]', '"ab"', "[", "[" * 100_000, '["\\ud800"]')
        ),
    )

    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)


def test_a_list_that_is_too_long_is_refused_with_the_limit():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<end>": 2}, []))
    backend = PROVIDER.create(PROVIDER.options(max_texts=1), GrammarContext(tokenizer.to_str(), 3, (2,)))
    assert backend.check(GrammarSpec(GrammarKind.CHOICE, '["a"]')) == ()
    with pytest.raises(GrammarError, match="got 2 texts, expected at most 1"):
        backend.check(GrammarSpec(GrammarKind.CHOICE, '["a", "b"]'))
