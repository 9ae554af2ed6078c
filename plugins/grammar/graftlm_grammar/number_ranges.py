"""EBNF expressions for the numbers between two bounds, in decimal notation."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

__all__ = ["Bound", "integers_between", "multiples_of", "numbers_between"]

_DIGITS: Final = "[0-9]*"
_ANY_FRACTION: Final = '("." [0-9]+)?'


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit of a range. `inclusive` is whether the limit is part of the range."""

    value: Decimal
    inclusive: bool = True

    @classmethod
    def of(cls, value: int | float, inclusive: bool) -> "Bound":
        """Return a bound whose value is a number's shortest decimal notation."""
        return cls(Decimal(repr(value)), inclusive)

    def negated(self) -> "Bound":
        """Return the bound with the opposite sign."""
        return Bound(-self.value, self.inclusive)


def integers_between(low: int | None, high: int | None) -> str | None:
    """Return an expression for the integers from low to high; None if there are none.

    Args:
        low: the smallest integer; None: no lower bound.
        high: the largest integer; None: no upper bound.
    """
    parts = []
    if low is None or low < 0:
        parts.append(_signed(_naturals(1 if high is None else max(1, -high), None if low is None else -low)))
    if high is None or high >= 0:
        parts.append(_naturals(max(0, low or 0), high))
    return _either(parts)


def numbers_between(low: Bound | None, high: Bound | None) -> str | None:
    """Return an expression for the numbers between two bounds, without exponents; None if there are none.

    Args:
        low: lower bound, or None.
        high: upper bound, or None.
    """
    if low is not None and high is not None:
        both_inclusive = low.inclusive and high.inclusive
        if low.value > high.value or (low.value == high.value and not both_inclusive):
            return None
    parts = []
    zero = Bound(Decimal(0))
    if low is None or low.value < 0:
        nearest = Bound(Decimal(0), inclusive=False) if high is None or high.value >= 0 else high.negated()
        parts.append(_signed(_magnitudes(nearest, None if low is None else low.negated())))
    if high is None or high.value >= 0:
        parts.append(_magnitudes(zero if low is None or low.value < 0 else low, high))
    return _either(parts)


def multiples_of(step: int, rule: str) -> dict[str, str]:
    """Return the rules for the multiples of a positive integer; the first rule is named `rule`.

    Each remainder has a rule: digit d leads from the rule of remainder r to the rule of (10 r + d) mod step.
    """

    def digits_from(remainder: int, first: int) -> list[str]:
        return [f'"{d}" {rule}_{(10 * remainder + d) % step}' for d in range(first, 10)]

    rules = {rule: f'"0" | "-"? ({" | ".join(digits_from(0, 1))})'}
    for remainder in range(step):
        ends = ['""'] if remainder == 0 else []
        rules[f"{rule}_{remainder}"] = " | ".join(ends + digits_from(remainder, 0))
    return rules


def _either(parts: list[str | None]) -> str | None:
    possible = [part for part in parts if part is not None]
    return f"({' | '.join(possible)})" if possible else None


def _signed(magnitude: str | None) -> str | None:
    return None if magnitude is None else f'"-" {magnitude}'


def _naturals(low: int, high: int | None) -> str | None:
    """Return an expression for the integers n with 0 <= low <= n <= high; `high` None: no upper bound."""
    if high is not None and high < low:
        return None
    parts: list[str | None] = []
    for num_digits in range(len(str(low)), len(str(low if high is None else high)) + 1):
        first = max(low, 10 ** (num_digits - 1) if num_digits > 1 else 0)
        last = 10**num_digits - 1 if high is None else min(high, 10**num_digits - 1)
        parts.append(_same_length(str(first), str(last)))
    if high is None:
        parts.append(f"[1-9] [0-9]{{{len(str(low))},}}")
    return _either(parts)


def _same_length(low: str, high: str) -> str:
    """Return an expression for the digit strings from low to high, which have the same length."""
    if low == high:
        return f'"{low}"'
    if set(low) == {"0"} and set(high) == {"9"}:
        return "[0-9]" * len(low)
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts: list[str | None] = []
    if set(low[1:]) - {"0"}:
        parts.append(f'"{first}" {_same_length(low[1:], "9" * rest)}')
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(f'"{last}" {_same_length("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]{'[0-9]' * rest}")
    return str(_either(parts))


def _magnitudes(low: Bound, high: Bound | None) -> str | None:
    """Return an expression for the numbers from low to high; low is not negative."""
    low_int, low_fraction = _split(low.value)
    if high is None:
        above = _naturals(low_int + 1, None)
        return _either(
            [
                _with_fraction(str(low_int), _fraction(low_fraction, low.inclusive, None, True)),
                f"{above} {_ANY_FRACTION}",
            ]
        )
    high_int, high_fraction = _split(high.value)
    if low_int == high_int:
        tail = _fraction(low_fraction, low.inclusive, high_fraction, high.inclusive)
        return _with_fraction(str(low_int), tail)
    between = _naturals(low_int + 1, high_int - 1)
    return _either(
        [
            _with_fraction(str(low_int), _fraction(low_fraction, low.inclusive, None, True)),
            None if between is None else f"{between} {_ANY_FRACTION}",
            _with_fraction(str(high_int), _fraction(None, True, high_fraction, high.inclusive))
            if high_int > low_int
            else None,
        ]
    )


def _split(value: Decimal) -> tuple[int, str]:
    """Return the integer part and the decimals, without trailing zeros."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _with_fraction(whole: str, fraction: str | None) -> str | None:
    return None if fraction is None else f'"{whole}" {fraction}'


def _fraction(low: str | None, low_inclusive: bool, high: str | None, high_inclusive: bool) -> str | None:
    """Return an expression for the text after the integer part: empty, or a point and decimals from low to high."""
    if _is_open(low, low_inclusive) and high is None:
        return _ANY_FRACTION
    empty, longer = _tails(low, low_inclusive, high, high_inclusive)
    parts: list[str | None] = ['""'] if empty else []
    if longer is not None:
        parts.append(f'"." {longer}')
    return _either(parts)


def _is_open(low: str | None, inclusive: bool) -> bool:
    return low is None or (low == "" and inclusive)


def _tails(low: str | None, low_inclusive: bool, high: str | None, high_inclusive: bool) -> tuple[bool, str | None]:
    """Return the decimals that may follow. The decimals so far equal the first decimals of each bound that is not None.

    Args:
        low, high: the remaining decimals of the bounds, without trailing zeros; None if the decimals so far already
            satisfy the bound.
        low_inclusive, high_inclusive: whether the bounds are part of the range.

    Returns: whether the number may end here, and an expression for one or more decimals (None if there are none).
    """
    if _is_open(low, low_inclusive):
        low = None
    empty = low is None and (high is None or high != "" or high_inclusive)
    if high == "":
        return (empty, '"0"+') if low is None and high_inclusive else (False, None)
    if low is None and high is None:
        return True, "[0-9]+"
    if low == "" and high is None:
        return False, f'"0"* [1-9] {_DIGITS}'
    low_digit, high_digit = int(low[0]) if low else 0, int(high[0]) if high else 9
    parts: list[str | None] = []
    for digit in range(low_digit, high_digit + 1):
        next_low = low[1:] if low is not None and digit == low_digit else None
        next_high = high[1:] if high is not None and digit == high_digit else None
        may_end, longer = _tails(next_low, low_inclusive, next_high, high_inclusive)
        if may_end or longer is not None:
            rest = longer if not may_end else f"({longer})?" if longer is not None else '""'
            parts.append(f'"{digit}" {rest}')
    return empty, _either(parts)
