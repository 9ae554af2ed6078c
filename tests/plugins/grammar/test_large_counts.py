"""For counts above 128, xgrammar's masks agree with `accept` for every kind of class, in every position."""

import json
import random

import numpy as np
import pytest
import xgrammar

from graftlm.contracts import GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.errors import GrammarError
from graftlm.testing.vocabularies import END_TOKEN, generate_tokenizer
from graftlm_grammar.mask_check import check_masks
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

VOCAB_SIZE = 1000
CLASSES = ("[^ae]", ".", r"\S", r"[a-z\u00e9]", r"[ -`b-\u07ff\ue000-\uffff]", "[a-z]", r"(?:[b-z]|[\u0080-\uffff])")
COUNTS = ("{129}", "{300}", "{130,}", "{10,200}", "{0,150}", "{140,290}")


@pytest.fixture(scope="module")
def tokenizer():
    return generate_tokenizer(VOCAB_SIZE)


@pytest.fixture(scope="module")
def context(tokenizer):
    return GrammarContext(tokenizer.to_str(), VOCAB_SIZE, (tokenizer.token_to_id(END_TOKEN),))


@pytest.fixture(scope="module")
def backend(context):
    return XGrammarBackend(XGrammarOptions(), context)


def allowed_tokens(matcher):
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepted_tokens(matcher):
    found = []
    for token_id in range(VOCAB_SIZE):
        if matcher.accept(token_id):
            matcher.rollback(1)
            found.append(token_id)
    return found


def assert_masks_are_right(backend, kind, text, num_checked=4):
    """Walk to the end, or for 400 tokens; try every token at the start, and after every 50 tokens."""
    matcher, draw = backend.compile(GrammarSpec(GrammarKind(kind), text)).matcher(), random.Random(text)
    for step in range(400):
        allowed = allowed_tokens(matcher)
        assert allowed, text
        if step % 50 == 0 and step // 50 < num_checked:
            assert accepted_tokens(matcher) == allowed, text
        assert matcher.accept(draw.choice(allowed)), text
        if matcher.finished:
            return


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("chars", CLASSES)
def test_masks_are_right_for_a_repeated_class(backend, chars, count):
    assert_masks_are_right(backend, "regex", f"x{chars}{count}y")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "string", "minLength": 300})),
        ("json_schema", json.dumps({"type": "string", "maxLength": 300})),
        ("json_schema", json.dumps({"type": "string", "minLength": 200, "maxLength": 1000})),
        ("json_schema", json.dumps({"type": "string", "pattern": "^[^ae]{10,200}$"})),
        ("json_schema", json.dumps({"type": "array", "items": {"type": "string", "minLength": 150}})),
        ("ebnf", "root ::= [^ae]{10,200}"),
        ("ebnf", "root ::= (a){10,200}\na ::= b\nb ::= [^ae]"),
        ("ebnf", 'root ::= "x" ("" [^ae]){200} ([^ae]{64}){4}'),
        ("ebnf", "root ::= ([^ae]{20}){20} [^ae]{129,}"),
        ("ebnf", 'root ::= ([^ae]{150} "-"){2}'),
        ("regex", "(?:[^ae]{2}){150}"),
        ("regex", "[^\\n]{0,150}[^a]{50}b"),
        ("regex", "[^\\n]{100,300}b[^a]{50}"),
    ],
)
def test_masks_are_right_for_a_count_in_any_position(backend, kind, text):
    assert_masks_are_right(backend, kind, text)


def test_masks_are_right_within_structural_tags(backend):
    structures = [
        {"begin": "<a>", "schema": {"type": "string", "minLength": 200}, "end": "</a>"},
        {"begin": "<b>", "regex": "[^ae]{10,200}", "end": "</b>"},
    ]
    tag = {"triggers": ["<a>", "<b>"], "structures": structures, "at_least_one": True}
    assert_masks_are_right(backend, "structural_tag", json.dumps(tag))


@pytest.mark.parametrize("count", ["{129}", "{300,}", "{120,140}", "{0,260}"])
@pytest.mark.parametrize("chars", ["[^ae]", r"[a-z\u00e9]"])
def test_the_allowed_counts_are_those_of_the_grammar(texts, chars, count):
    least, _, most = count.strip("{}").partition(",")
    least, most = int(least), int(most or (least if "," not in count else 10**6))
    lengths = sorted({0, 119, 120, 127, 128, 129, 130, 139, 140, 141, 256, 257, 260, 261, 299, 300, 301})
    accepted = texts.accepted(
        "regex", f"{chars}{count}", ["b" * (length - 1) + "\u00e9" if length else "" for length in lengths]
    )
    assert [len(text) for text in accepted] == [length for length in lengths if least <= length <= most]


class LibraryMatcher(GrammarMatcher):
    """A grammar in the library's own reading."""

    def __init__(self, matcher):
        self.matcher = matcher

    def accept(self, token_id):
        return self.matcher.accept_token(token_id)

    def rollback(self, num_tokens):
        self.matcher.rollback(num_tokens)

    def fill_bitmask(self, mask, row):
        self.matcher.fill_next_token_bitmask(mask, row)

    def forced_text(self):
        return ""

    def forced_tokens(self):
        return []

    @property
    def finished(self):
        return self.matcher.is_terminated()


@pytest.mark.parametrize("count", ["{10,200}", "{300}", "{300,}"])
def test_a_grammar_that_the_library_misreads_is_found_during_compilation(tokenizer, count):
    text = rf"root ::= [\u0000-`b-df-\ud7ff\ue000-\U0010ffff]{count}"
    vocab = [tokenizer.decode([i]).encode() for i in range(256, VOCAB_SIZE - 3)]
    info = xgrammar.TokenizerInfo(vocab, xgrammar.VocabType.RAW, vocab_size=len(vocab), stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(text)
    with pytest.raises(GrammarError, match="allows tokens that it then rejects"):
        check_masks(GrammarKind.EBNF, LibraryMatcher(xgrammar.GrammarMatcher(compiled)), len(vocab))
