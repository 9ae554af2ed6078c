"""Expressions for numbers between bounds match exactly these numbers."""

import random
import re
from decimal import Decimal

import pytest

from graftlm_grammar.number_ranges import Bound, integers_between, multiples_of, numbers_between

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


def candidates(draw, bounds):
    """Return numbers near the given ones, in various spellings."""
    steps = ["0", "0.1", "-0.1", "0.001", "-0.001", "1", "-1", "0.05", "10", "-100"]
    values = [bound.value + Decimal(step) for bound in bounds for step in steps]
    values += [Decimal(draw.randint(-3000, 3000)) / 100 for _ in range(20)] + [Decimal(10) ** n for n in range(7)]
    spelt = {f"{value:f}{zeros}" for value in values for zeros in ("", "0", ".0")}
    return sorted(text for text in spelt if NUMBER.fullmatch(text) and not (text[0] == "-" and Decimal(text) == 0))


def draw_value(draw):
    digits = draw.choice([0, 0, 1, 2, 4])
    return Decimal(draw.randint(-(10 ** draw.randint(1, 6)), 10**5)) / 10**digits


def within(value, low, high):
    above = low is None or value > low.value or (low.inclusive and value == low.value)
    return above and (high is None or value < high.value or (high.inclusive and value == high.value))


@pytest.mark.parametrize("seed", range(60))
def test_expressions_match_exactly_the_numbers_between_bounds(texts, seed):
    draw = random.Random(seed)
    values = sorted([draw_value(draw), draw_value(draw)])
    low, high = (draw.choice([None, Bound(value, True), Bound(value, False)]) for value in values)
    numbers = candidates(draw, [bound for bound in (low, high) if bound])
    expected = [number for number in numbers if within(Decimal(number), low, high)]
    expression = numbers_between(low, high)
    if expression is None:
        assert expected == []
    else:
        assert texts.accepted("ebnf", f"root ::= {expression}", numbers) == expected


@pytest.mark.parametrize("seed", range(60))
def test_expressions_match_exactly_the_integers_between_bounds(texts, seed):
    draw = random.Random(seed)
    values = sorted([int(draw_value(draw)), int(draw_value(draw))])
    low, high = (draw.choice([None, value, value]) for value in values)
    bounds = [Bound(Decimal(value)) for value in (low, high) if value is not None]
    integers = [text for text in candidates(draw, bounds) if "." not in text]
    expected = [n for n in integers if (low is None or int(n) >= low) and (high is None or int(n) <= high)]
    assert texts.accepted("ebnf", f"root ::= {integers_between(low, high)}", integers) == expected


def test_an_empty_range_has_no_expression():
    one = Decimal(1)
    assert integers_between(2, 1) is None
    assert numbers_between(Bound(one), Bound(one, inclusive=False)) is None
    assert numbers_between(Bound(one), Bound(one)) is not None


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10, 64])
def test_expressions_match_exactly_the_multiples(texts, step):
    rules = multiples_of(step, "m")
    grammar = "root ::= m\n" + "\n".join(f"{name} ::= {body}" for name, body in rules.items())
    numbers = [str(n) for n in range(-150, 300)] + ["-0", "00", "010", ""]
    expected = [str(n) for n in range(-150, 300) if n % step == 0]
    assert texts.accepted("ebnf", grammar, numbers) == expected
