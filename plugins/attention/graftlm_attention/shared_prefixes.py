"""Which requests of a step begin with the same pages, so that attention can read these once for all of them."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedPrefixes", "find_shared_prefixes"]

#: Where fewer share less, reading it once saves less than joining two parts costs.
_MIN_REQUESTS: Final = 4
_MIN_TOKENS: Final = 256
#: Pages of a request, and of a group, that are compared at once: so few that it ends soon after pages differ, and stays
#: in the CPU's caches.
_COMPARED_PAGES: Final = 512
_COMPARED_IN_ALL: Final = 1 << 18


class SharedPrefixes(NamedTuple):
    """Groups of requests of one token each; int32, C-contiguous.

    Attributes:
        starts: [G + 1], where a group's requests begin among `members`.
        members: indices of requests, of one group after the other.
        lens: [G], tokens that a group's requests have in common, whole pages and fewer than any of their contexts.
    """

    starts: NDArray[np.int32]
    members: NDArray[np.int32]
    lens: NDArray[np.int32]


def find_shared_prefixes(
    page_table: NDArray[np.int32], seq_lens: NDArray[np.int32], num_decodes: int, page_size: int
) -> SharedPrefixes | None:
    """Group a step's one-token requests by the pages that their contexts begin with; None where there is no group.

    Requests are grouped by the page of their 256th token, and one look at it is all that requests cost that share
    nothing: a prefix cache gives no two of them the same page after different ones. Of a group, pages are compared up
    to the first that differ.

    Args:
        page_table: [B, P].
        seq_lens: [B].
        num_decodes: requests of one token each; they stand at the front.
        page_size: tokens in a page.
    """
    column = -(-_MIN_TOKENS // page_size) - 1
    if num_decodes < _MIN_REQUESTS or page_table.shape[1] <= column:
        return None
    is_long = seq_lens[:num_decodes] > (column + 1) * page_size
    if column:  # where a window has gone by, page 0 stands for all pages, and no layer reads it
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
    """Return how many of the first `num_pages` pages all members have in common."""
    start, width = 0, _COMPARED_PAGES
    widest = max(width, _COMPARED_IN_ALL // len(members))
    while start < num_pages:
        end = min(start + width, num_pages)
        differs = (page_table[members, start:end] != page_table[members[0], start:end]).any(axis=0)
        if differs.any():
            return start + int(differs.argmax())
        start, width = end, min(2 * width, widest)
    return num_pages
