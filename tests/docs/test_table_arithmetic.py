"""Ratios in tables of docs/ follow from the columns beside them."""

import re
from dataclasses import dataclass

import pytest

from .pages import OTHERS, PAGES

_NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
#: A figure, with or without a unit, followed in parentheses by its ratio to the row's first figure; more may follow.
FIGURE = re.compile(
    rf"^(?:\*\*)?{_NUMBER}(?: [^\W\d]+)?(?:\*\*)?(?: \({_NUMBER}( %)?(?: times (fewer|faster|less))?[;)].*)?$"
)
#: A ratio of the two preceding figures, in a column with this header.
RATIO = re.compile(rf"^{_NUMBER}\b")


@dataclass(frozen=True, slots=True)
class Shown:
    """A number as a page shows it; it represents all numbers that are rounded to it."""

    text: str

    @property
    def range(self) -> tuple[float, float]:
        value = float(self.text.replace(",", ""))
        half = 0.5 * 10.0 ** -len(self.text.partition(".")[2])
        return value - half, value + half

    def is_ratio_of(self, above, below, factor=1.0):
        """Return whether a number can be `factor` times the quotient of two others, within their rounding."""
        (low, high), (above_low, above_high), (below_low, below_high) = self.range, above.range, below.range
        return factor * above_low / below_high <= high and low <= factor * above_high / max(below_low, 1e-12)


def tables(text):
    """Yield the rows of each table, starting with its header; cells are stripped."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        if len(rows) > 2 and all(set(cell) <= set("-: ") for cell in rows[1]):
            yield [rows[0], *rows[2:]]


def claims(rows):
    """Yield (row, claimed ratio, whether it follows) of a table."""
    header = rows[0]
    for row in rows[1:]:
        found = [(i, match) for i, cell in enumerate(row) if i and (match := FIGURE.match(cell))]
        for column, match in found:
            if match[2] is None:
                continue
            before = [other for i, other in found if i < column]
            if match[4]:  # "times fewer" than the figure in the previous column
                follows = before and Shown(match[2]).is_ratio_of(Shown(before[-1][1]), Shown(match[1]))
            elif before:
                factor = 100.0 if match[3] else 1.0
                follows = Shown(match[2]).is_ratio_of(Shown(match[1]), Shown(before[0][1]), factor)
            else:
                continue
            yield row, row[column], follows
        for column, title in enumerate(header):
            if title.startswith("ratio") and (ratio := RATIO.match(row[column])):
                below, above = (Shown(RATIO.match(row[i])[1]) for i in (column - 2, column - 1))
                yield row, row[column], Shown(ratio[1]).is_ratio_of(above, below)


TEXTS = {path.name: path.read_text(encoding="utf-8") for path in [*PAGES.values(), *OTHERS]}


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if any(map(list, map(claims, tables(text))))])
def test_ratios_follow_from_their_columns(name):
    wrong = [(row[0], claim) for rows in tables(TEXTS[name]) for row, claim, follows in claims(rows) if not follows]
    assert wrong == []


@pytest.mark.parametrize(
    ("row", "follows"),
    [
        ("| a | 11.1 | 14.4 | 1.85 (1.10 to 1.88) |", False),
        ("| a | 11.1 | 14.4 | 1.30 (1.10 to 1.88) |", True),
        ("| a | 2,976 | 105 (28 times faster) | |", True),
        ("| a | 2,976 | 105 (38 times faster) | |", False),
        ("| a | 22.0 | 23.4 (1.06) | |", True),
        ("| a | 22.0 | 23.4 (1.16) | |", False),
        ("| a | 26.0 GiB | 10.5 GiB (40 %) | |", True),
        ("| a | 26.0 GiB | 10.5 GiB (60 %) | |", False),
    ],
)
def test_a_ratio_that_does_not_follow_is_found(row, follows):
    (table,) = tables(f"| | one | other | ratio |\n|---|---|---|---|\n{row}\n")
    assert [claim[2] for claim in claims(table)] == [follows]
