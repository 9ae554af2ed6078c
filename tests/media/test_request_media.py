"""The feature rows of a prompt's positions, and runs of feature tokens."""

import numpy as np
import pytest

from graftlm.media import MediaItem, RequestMedia

#: Two pictures: one at 2 to 4, the other at 5, 6 and 8, 9, with a text token between.
MEDIA = RequestMedia(
    [MediaItem(b"a", 3, {}), MediaItem(b"b", 4, {})], np.array([2, 3, 4, 5, 6, 8, 9]), feature_token_id=7
)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 2, []),
        (0, 3, [(b"a", 0, [2])]),
        (3, 6, [(b"a", 1, [3, 4]), (b"b", 0, [5])]),
        (6, 9, [(b"b", 1, [6, 8])]),
        (0, 20, [(b"a", 0, [2, 3, 4]), (b"b", 0, [5, 6, 8, 9])]),
        (10, 20, []),
    ],
)
def test_rows_of_positions(start, end, expected):
    found = [(rows.item.key, rows.first, rows.positions.tolist()) for rows in MEDIA.within(start, end)]
    assert found == expected


@pytest.mark.parametrize(
    ("position", "expected"),
    [(2, None), (3, (2, 7)), (5, (2, 7)), (6, (2, 7)), (7, None), (8, None), (9, (8, 10)), (10, None), (0, None)],
)
def test_a_run_is_found_where_a_cut_would_divide_it(position, expected):
    assert MEDIA.run_around(position) == expected


def test_bounds_and_shown_ids():
    assert (MEDIA.first_positions, MEDIA.last_positions) == ([2, 5], [4, 9])
    assert MEDIA.shown(np.array([1, -5, 3], dtype=np.int32)).tolist() == [1, 7, 3]
    assert MEDIA.rope_offset == 0


def test_generated_tokens_follow_the_largest_position():
    rope = np.array([[0, 1, 1, 2], [0, 1, 2, 3], [0, 2, 1, 3]])
    assert RequestMedia(MEDIA.items, MEDIA.positions, 7, rope).rope_offset == 0
    assert RequestMedia(MEDIA.items, MEDIA.positions, 7, rope - 1).rope_offset == -1
