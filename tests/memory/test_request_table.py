"""Rows of running requests, and the number of rows with an adapter."""

import numpy as np

from graftlm.memory import RequestTable


def test_rows_with_an_adapter_are_counted_until_they_are_freed():
    table = RequestTable(num_rows=3, max_pages_per_row=2)
    rows = [table.take_row(4, 8, slot) for slot in (2, 0, 1)]
    assert (table.num_adapted, table.adapter_slot[rows].tolist()) == (2, [2, 0, 1])
    table.drop_row(rows[0])
    table.drop_row(rows[1])
    assert (table.num_adapted, table.adapter_slot[rows].tolist()) == (1, [0, 0, 1])
    assert table.take_row(4, 8) == rows[1]
    assert table.adapter_slot[rows[1]] == 0
    table.clear()
    assert (table.num_adapted, np.count_nonzero(table.adapter_slot)) == (0, 0)
