"""The `xgrammar` backend keeps its contract, and its own code on top of the library is right."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import graftlm_grammar
from graftlm.contracts import API_VERSION, GrammarContext, GrammarKind, GrammarSpec, Platform
from graftlm.errors import GrammarError
from graftlm.testing import GrammarBackendConformance
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

PROVIDER = next(one for one in graftlm_grammar.provide_grammar_backends() if one.name == "xgrammar")


class TestXGrammar(GrammarBackendConformance):
    def create(self, context: GrammarContext):
        return PROVIDER.create(PROVIDER.options(), context)


def test_the_provider_is_available_if_the_library_is_installed():
    assert PROVIDER.api_version == API_VERSION
    assert PROVIDER.unavailable(Platform()) is None


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("ebnf", "root ::= b", 'ebnf: .*Rule "b" is not defined'),
        ("ebnf", 'start ::= "a"', "ebnf: .*root"),
        ("ebnf", 'root ::= "a" {1001}', "ebnf: .*1000 repetitions"),
        ("ebnf", "root ::= [a-z]{2,5000}", "ebnf: .*1000 repetitions"),
        ("ebnf", "\ud800", "ebnf: not text"),
        ("regex", "x" * 300_000, "regex: got 300000 characters, expected at most"),
        ("json_schema", '{"const": "\ud800"}', "json_schema: not text"),
    ],
)
def test_malformed_specifications_are_refused_with_a_reason(byte_backend, kind, text, said):
    for method in (byte_backend.check, byte_backend.compile):
        with pytest.raises(GrammarError, match=said):
            method(GrammarSpec(GrammarKind(kind), text))


def test_unpaired_surrogates_are_not_characters(byte_backend):
    for ebnf in ("root ::= [^a]", "root ::= ."):
        matcher = byte_backend.compile(GrammarSpec(GrammarKind.EBNF, ebnf)).matcher()
        assert [matcher.accept(byte) for byte in b"\xed\xa0"] == [True, False]


def test_braces_in_literals_are_not_repetitions(byte_backend):
    byte_backend.check(GrammarSpec(GrammarKind.EBNF, 'root ::= "a{5000}" [{5000}]* # {5000}'))


def test_forced_text_ends_with_a_whole_character(byte_backend):
    matcher = byte_backend.compile(GrammarSpec(GrammarKind.EBNF, 'root ::= "ab" ("é" | "è")')).matcher()
    assert matcher.forced_text() == "ab"
    assert list(matcher.forced_tokens()) == [*b"ab", 0xC3]


def test_many_forced_tokens_are_truncated(byte_backend):
    matcher = byte_backend.compile(GrammarSpec(GrammarKind.EBNF, 'root ::= "a"{200}')).matcher()
    assert list(matcher.forced_tokens()) == [ord("a")] * 64


def test_a_trigger_without_a_structure_is_refused_by_name(byte_backend):
    structures = [{"begin": "<n>", "schema": {"const": 7}, "end": ""}]
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"triggers": ["<n>", "?"], "structures": structures}))
    with pytest.raises(GrammarError, match="no structure begins with '\\?'"):
        byte_backend.check(spec)


def sentencepiece_like():
    """Return a tokenizer whose tokens have blanks as U+2581 and bytes as <0x..>."""
    words = ["<unk>", "</s>", "x", "▁x", "▁", "é", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.add_tokens(["<tool> x"])
    return tokenizer


@pytest.mark.parametrize(
    ("regex", "tokens"),
    [
        ("x x", ["x", "▁x"]),
        ("x x", ["x", "▁", "x"]),
        ("xü", ["x", "<0xC3>", "<0xBC>"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<tool> x", ["<tool> x"]),
    ],
)
def test_tokens_have_the_text_that_they_decode_to(regex, tokens):
    tokenizer = sentencepiece_like()
    end = tokenizer.token_to_id("</s>")
    backend = XGrammarBackend(XGrammarOptions(), GrammarContext(tokenizer.to_str(), 300, (end,)))
    matcher = backend.compile(GrammarSpec(GrammarKind.REGEX, regex)).matcher()
    assert all(matcher.accept(tokenizer.token_to_id(token)) for token in [*tokens, "</s>"])


def test_special_tokens_are_not_text_even_if_they_look_like_it():
    tokenizer = sentencepiece_like()
    context = GrammarContext(tokenizer.to_str(), 300, (tokenizer.token_to_id("</s>"), 999))
    matcher = XGrammarBackend(XGrammarOptions(), context).compile(GrammarSpec(GrammarKind.REGEX, ".*")).matcher()
    for token in ("<unk>", "</s>"):
        mask = np.zeros((1, 10), dtype=np.int32)
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert (tokenizer.token_to_id(token) in allowed) == (token == "</s>")
    assert matcher.accept(tokenizer.token_to_id("</s>"))
    assert matcher.finished
