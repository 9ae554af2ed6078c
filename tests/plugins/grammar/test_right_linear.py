import random

import numpy as np
import pytest
import xgrammar

from graftlm.contracts import GrammarContext
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence, read_ebnf
from graftlm_grammar.ebnf_text import ebnf_text
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.right_linear import right_linear
from graftlm_grammar.xgrammar_backend import XGrammarBackend

NAMES = ("root", "a", "b", "c")
GRAMMARS = {
    "repeated": 'root ::= "<" ("a" | [b-d]+ ";")* ">"',
    "counted": 'root ::= [a-c]{2,5} ("," [x-z]{3}){0,2} "."',
    "counted at the end": 'root ::= [a-c]{2,5} | "(" root ")"',
    "recursive": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"',
    "left recursive": 'root ::= root "+" item | item\nitem ::= [0-9] | "(" root ")"',
    "rules that call each other": 'root ::= a "." | b\na ::= "x" b?\nb ::= "y" a | "z"',
    "repeats what may be empty": 'root ::= ("a"? [b]*)* "c"\n',
    "a name like those that are made": 'root ::= n1 ("," n1)*\nn1 ::= [a-b]+ nn\nnn ::= "!" | "?"',
    "a rule within a repetition": 'root ::= (pair ";"){1,3}\npair ::= [a-c] "=" [0-9]+',
    "empty": 'root ::= "" | "a" root',
}


def masks(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> np.ndarray:
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    matcher.fill_next_token_bitmask(mask)
    return np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]


def assert_alike(context: GrammarContext, before: str, after: str, rng: random.Random) -> None:
    """Walk along tokens that both grammars allow."""
    compiler = XGrammarBackend(XGrammarOptions(), context)._compiler
    grammars = [compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text)) for text in (before, after)]
    for _ in range(6):
        one, two = map(xgrammar.GrammarMatcher, grammars)
        text: list[int] = []
        for _ in range(12):
            allowed = masks(one, context.vocab_size)
            np.testing.assert_array_equal(allowed, masks(two, context.vocab_size), err_msg=f"{before}\n{after}\n{text}")
            if not allowed.any():
                break
            text.append(rng.choice(np.flatnonzero(allowed).tolist()))
            assert one.accept_token(text[-1])
            assert two.accept_token(text[-1])
            if one.is_terminated():
                assert two.is_terminated()
                break


@pytest.mark.parametrize("text", GRAMMARS.values(), ids=GRAMMARS)
def test_the_new_rules_accept_the_same_texts_as_the_old_ones(byte_context, text):
    assert_alike(byte_context, text, ebnf_text(right_linear(read_ebnf(text))), random.Random(0))


@pytest.mark.parametrize("seed", range(40))
def test_random_rules_accept_the_same_texts_after_the_rewrite(byte_context, seed):
    rng = random.Random(seed)
    rules = {name: random_expression(rng, 3) for name in NAMES}
    rules["root"] = Sequence((Chars(((60, 60),)), rules["root"]))  # so that no rule is left-recursive through `root`
    assert_alike(byte_context, ebnf_text(rules), ebnf_text(right_linear(rules)), rng)


def random_expression(rng: random.Random, depth: int) -> Expression:
    kind = rng.choice(["chars", "chars", "reference", "sequence", "either", "repeated"]) if depth else "chars"
    if kind == "sequence":
        return Sequence(tuple(random_expression(rng, depth - 1) for _ in range(rng.randint(2, 3))))
    if kind == "either":
        return Alternatives(tuple(random_expression(rng, depth - 1) for _ in range(rng.randint(2, 3))))
    if kind == "repeated":
        least = rng.randint(0, 2)
        return Repeated(random_expression(rng, depth - 1), least, rng.choice([None, least + rng.randint(1, 3)]))
    if kind == "reference":
        # After a character of its own, and with an alternative, so that each rule ends.
        name = rng.choice(NAMES)
        return Alternatives((Sequence((random_chars(rng), Reference(name))), random_chars(rng)))
    return random_chars(rng)


def random_chars(rng: random.Random) -> Chars:
    first = rng.randint(97, 104)
    return Chars(((first, first + rng.randint(0, 3)),))


@pytest.mark.parametrize(
    ("text", "is_written_out"),
    [
        ('root ::= a ";" a\na ::= [a-z]+', True),
        ('root ::= a ";" a\na ::= "(" a ")" | "."', False),
        ("root ::= " + " ".join(["a"] * 300) + '\na ::= "0123456789"', False),  # used too often
    ],
    ids=["small", "recursive", "often"],
)
def test_small_rules_are_inlined(text, is_written_out):
    assert ("a" not in right_linear(read_ebnf(text))) is is_written_out


@pytest.mark.parametrize(
    "text",
    [
        f'root ::= "{"a" * 100_000}"',
        "\n".join([f'r{i} ::= "a" r{i + 1} | "b" r{i + 1}' for i in range(3000)]) + '\nr3000 ::= "c"\nroot ::= r0',
        "\n".join([f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)]) + '\nr40 ::= "c"\nroot ::= r0',
        f"root ::= {'(' * 99}[a-z]{')?' * 99}",
        "root ::= " + "(" * 8 + '"a"' + "){1,9}" * 8,
    ],
    ids=["long", "chain", "doubling", "deep", "repeated in each other"],
)
def test_the_size_of_the_rewritten_grammar_is_limited(text):
    rules = right_linear(read_ebnf(text))
    assert len(ebnf_text(rules)) < 10 * len(text) + 100_000
