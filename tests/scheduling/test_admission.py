"""Memory that is reserved for running requests when a new request is admitted."""

import pytest

from graftlm.memory import RequestTable
from graftlm.scheduling.admission import AdmissionControl


def make(page_size=4, **rows):
    """Return an admission control with rows of (held pages, known tokens, limit)."""
    table = RequestTable(num_rows=4, max_pages_per_row=64)
    for row, (pages, known, limit) in enumerate(rows.values()):
        table.num_pages[row], table.known[row], table.limit[row] = pages, known, limit
    return AdmissionControl(table, page_size)


@pytest.mark.parametrize(
    ("rows", "leaving", "expected"),
    [
        ({}, (), 0),
        ({"a": (3, 10, 30)}, (), 3),  # half of 20 tokens: 10 tokens, 3 pages
        ({"a": (1, 10, 10)}, (), 2),  # 6 tokens of the prompt
        ({"a": (1, 10, 30)}, (), 4),
        ({"a": (1, 10, 30), "b": (3, 10, 30)}, (), 7),
        ({"a": (1, 10, 30), "b": (3, 10, 30)}, (0,), 3),
        ({"a": (1, 10, 30), "b": (3, 10, 30)}, (0, 1), 0),
        ({"a": (3, 10, 100_000)}, (), 512),  # half of 4,096 tokens
    ],
)
def test_pages_for_prompts_and_a_share_of_outputs_are_reserved(rows, leaving, expected):
    assert make(**rows).reserved_pages(leaving) == expected


def test_the_share_decreases_per_step_and_increases_per_retraction_within_bounds():
    control = make()
    assert control.share == 0.5
    control.step_planned()
    assert control.share == pytest.approx(0.5 * 0.995)
    control.retracted()
    assert control.share == pytest.approx(0.5 * 0.995 + 0.1)
    for _ in range(10):
        control.retracted()
    assert control.share == 1.0
    for _ in range(1000):
        control.step_planned()
    assert control.share == 0.05


def test_a_retraction_makes_further_ones_rarer(make_rig):
    rig = make_rig(num_pages=100)
    for i in range(24):
        rig.add(f"r{i}", [i, i + 1, i + 2], max_new_tokens=60)
    rig.run()
    assert 0 < rig.scheduler.counters.retractions < 40  # 65 if retractions do not change the estimate
