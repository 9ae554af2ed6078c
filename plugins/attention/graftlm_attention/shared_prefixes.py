"""Groups requests of a step that start with the same pages, so that attention reads these pages once per group."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedPrefixes", "find_shared_prefixes"]

#: Minimum number of requests and of shared tokens in a group. In a smaller group, merging two partial results costs
#: more time than reading the shared pages only once saves.
_MIN_REQUESTS: Final = 4
_MIN_TOKENS: Final = 256
#: Number of pages per request in the first comparison, and maximum number of pages per group in any comparison. Small
#: values let the search stop soon after the first difference, and keep the compared page ids in the CPU's caches.
_FIRST_COMPARED_PAGES: Final = 512
_MAX_COMPARED_PAGES: Final = 1 << 18


class SharedPrefixes(NamedTuple):
    """Groups of requests of one token each; int32, C-contiguous.

    Attributes:
        starts: [G + 1], index in `members` of each group's first request.
        members: indices of the requests, ordered by group.
        lens: [G], number of tokens that each group shares; a multiple of the page size, and less than the length of
            every context in the group.
    """

    starts: NDArray[np.int32]
    members: NDArray[np.int32]
    lens: NDArray[np.int32]


def find_shared_prefixes(
    page_table: NDArray[np.int32], seq_lens: NDArray[np.int32], num_decodes: int, page_size: int
) -> SharedPrefixes | None:
    """Group a step's one-token requests by their first pages. Returns None if there is no group.

    Requests are grouped by the page that contains their 256th token. One comparison is enough: if contexts have the
    same page at a position, all their earlier pages are the same, too. Within a group, later pages are then compared up
    to the first difference.

    Args:
        page_table: int32 [B, P], page ids.
        seq_lens: int32 [B], context lengths in tokens.
        num_decodes: number of one-token requests; they are the first requests of the batch.
        page_size: number of tokens in a page.
    """
    column = -(-_MIN_TOKENS // page_size) - 1
    if num_decodes < _MIN_REQUESTS or page_table.shape[1] <= column:
        return None
    is_long = seq_lens[:num_decodes] > (column + 1) * page_size
    if column:  # a sliding window's table has 0 for freed pages, also in column 0; no layer reads these entries
        is_long &= page_table[:num_decodes, column] != page_table[:num_decodes, 0]
    (long,) = is_long.nonzero()
    order = long[page_table[long, column].argsort(kind="stable")]
    pages = page_table[order, column]
    ends = [*(np.flatnonzero(pages[1:] != pages[:-1]) + 1).tolist(), len(order)]
    groups: list[NDArray[np.intp]] = []
    lens: list[int] = []
    start = 0
    for end in ends:
        members = order[start:end]
        start = end
        if len(members) < _MIN_REQUESTS:
            continue
        num_pages = (int(seq_lens[members].min()) - 1) // page_size
        num_shared = _num_shared(page_table, members, num_pages)
        if num_shared * page_size >= _MIN_TOKENS:
            groups.append(members)
            lens.append(num_shared * page_size)
    if not groups:
        return None
    starts = np.cumsum([0, *map(len, groups)], dtype=np.int32)
    return SharedPrefixes(starts, np.concatenate(groups).astype(np.int32), np.array(lens, dtype=np.int32))


def _num_shared(page_table: NDArray[np.int32], members: NDArray[np.intp], num_pages: int) -> int:
    """Return the number of equal pages at the start of all members, at most `num_pages`."""
    start, width = 0, _FIRST_COMPARED_PAGES
    widest = max(width, _MAX_COMPARED_PAGES // len(members))
    while start < num_pages:
        end = min(start + width, num_pages)
        differs = (page_table[members, start:end] != page_table[members[0], start:end]).any(axis=0)
        if differs.any():
            return start + int(differs.argmax())
        start, width = end, min(2 * width, widest)
    return num_pages
