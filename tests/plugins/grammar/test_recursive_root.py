"""If rules refer to the root rule, xgrammar's masks contain the tokens that cross the end of an inner root."""

import json

import numpy as np
import pytest

from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm.testing.vocabularies import END_TOKEN, generate_tokenizer
from graftlm_grammar import xgrammar_backend
from graftlm_grammar.ebnf import read_ebnf, references
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.recursive_root import with_separate_root
from graftlm_grammar.xgrammar_backend import XGrammarBackend

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def tokenizer():
    return generate_tokenizer(VOCAB_SIZE)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return XGrammarBackend(
        XGrammarOptions(), GrammarContext(tokenizer.to_str(), VOCAB_SIZE, (tokenizer.token_to_id(END_TOKEN),))
    )


@pytest.fixture(scope="module")
def pairs(tokenizer):
    """Return pairs of tokens with two digits."""
    tokens = [tokenizer.id_to_token(i) for i in range(VOCAB_SIZE)]
    return [token for token in tokens if len(token) == 2 and token.isascii() and token.isdigit()]


def disagreements(backend, tokenizer, ebnf, text):
    """Return the tokens for which mask and `accept` disagree after a text."""
    matcher = backend.compile(GrammarSpec(GrammarKind.EBNF, ebnf)).matcher()
    for character in text:
        assert matcher.accept(tokenizer.token_to_id(character))
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    accepted = set()
    for token_id in range(VOCAB_SIZE):
        if matcher.accept(token_id):
            matcher.rollback(1)
            accepted.add(token_id)
    assert accepted
    return allowed ^ accepted


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        'root ::= "(" root* "{last}" | "{first}"',
        'root ::= "(" (root ("," root)*)? "{last}" | [{first}-{first}]',
        'root ::= "(" list "{last}" | ("{first}" | ";")\nlist ::= root list | ""',
        'root ::= "(" inner "{last}" | "{first}"\ninner ::= root',
    ],
)
def test_masks_contain_tokens_that_cross_the_end_of_an_inner_root(
    backend, tokenizer, pairs, form, is_long, monkeypatch
):
    first, last = next(pair for pair in pairs if pair[0] != pair[1])
    ebnf = form.replace("{first}", first).replace("{last}", last)
    if is_long:  # like a grammar that is too long to be rewritten for speed
        monkeypatch.setattr(xgrammar_backend, "_MAX_REWRITTEN_LEN", 0)
    assert disagreements(backend, tokenizer, ebnf, "((") == set()


def test_masks_of_a_schema_that_refers_to_itself_are_right(backend, tokenizer):
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    matcher = backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))).matcher()
    for character in '{"a":{':
        assert matcher.accept(tokenizer.token_to_id(character))
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    for token_id in range(VOCAB_SIZE):
        accepted = matcher.accept(token_id)
        if accepted:
            matcher.rollback(1)
        assert accepted == bool(bits[token_id]), tokenizer.id_to_token(token_id)


def test_after_the_rewrite_no_rule_refers_to_the_root():
    rules = read_ebnf('root ::= "a" root? | (root_ | "b" root){2,3}\nroot_ ::= root "c"')
    separate = with_separate_root(rules)
    assert next(iter(separate)) == "root"
    assert all("root" not in references(expression) for expression in separate.values())
    assert set(separate) == {"root", "root__", "root_"}


def test_rules_without_a_reference_to_the_root_are_unchanged():
    rules = read_ebnf('root ::= "a" b\nb ::= "c" b | ""')
    assert with_separate_root(rules) == rules
