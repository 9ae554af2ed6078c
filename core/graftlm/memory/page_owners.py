"""Counts pages by owner for statistics, and checks that every page has exactly one owner."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache
from graftlm.errors import InvariantError
from graftlm.memory.page_pool import PagePool
from graftlm.memory.request_table import RequestTable
from graftlm.memory.row_windows import RowWindows

__all__ = ["KVUsage", "check_owners", "count_owners"]


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Numbers of pages by owner; `total` is the sum of the other numbers.

    Attributes:
        evictable: number of cached pages that are not on a locked path.
        locked: number of cached pages on locked paths.
        owned: number of pages that running rows own and that are not cached.
    """

    total: int
    free: int
    evictable: int
    locked: int
    owned: int


def count_owners(pool: PagePool, cache: PrefixCache, table: RequestTable) -> KVUsage:
    """Return the numbers of pages by owner."""
    owned = int((table.num_pages - table.cached_pages).sum())
    return KVUsage(pool.num_pages, pool.num_free, cache.evictable_pages, cache.locked_pages, owned)


def check_owners(pool: PagePool, cache: PrefixCache, table: RequestTable, row_windows: RowWindows | None) -> None:
    """Check that every page, and every window page, has exactly one owner. O(pages); for debug mode and tests.

    Raises:
        InvariantError: a page has no owner or several, or counts differ; the message has these pages or counts.
    """
    cached = [node.pages for node in cache.walk()]
    own = [table.own_pages(row) for row in np.flatnonzero(table.num_pages).tolist()]
    held = np.concatenate([np.flatnonzero(pool.free_mask()), *cached, *own])
    unknown = held[(held < 0) | (held >= pool.num_pages)]
    if len(unknown):
        raise InvariantError(f"pages {unknown[:4].tolist()} are owned, but page ids are 0 to {pool.num_pages - 1}")
    num_cached = sum(map(len, cached))
    usage = count_owners(pool, cache, table)
    if num_cached != usage.evictable + usage.locked:
        raise InvariantError(
            f"prefix cache: nodes have {num_cached} pages, counters have {usage.evictable} evictable and "
            f"{usage.locked} locked"
        )
    wrong = np.flatnonzero(np.bincount(held, minlength=pool.num_pages) != 1)
    if len(wrong):
        raise InvariantError(f"pages {_describe(wrong[:4], pool, cache, table)} of {usage}")
    if row_windows is not None:
        _check_windows(pool, cache, table, row_windows)


def _check_windows(pool: PagePool, cache: PrefixCache, table: RequestTable, row_windows: RowWindows) -> None:
    """Check that the window pages in use are exactly those of the cache and of the rows."""
    window = row_windows.pages
    window.check(pool.free_mask())
    num_held = 0
    for node in cache.walk():
        num_held += len(node.pages) if node.has_window else 0
        if (window.holds(node.pages) != node.has_window).any():
            raise InvariantError(f"cache node {node.node_id}: has_window is {node.has_window}, but its pages differ")
    for row in np.flatnonzero(table.num_pages).tolist():
        kept = row_windows.kept(row)
        num_held += len(kept)
        if not window.holds(kept).all():
            raise InvariantError(f"row {row}: a page in its window has no window page")
    if num_held != window.num_held:
        raise InvariantError(f"{window.num_held} window pages are in use, the cache and the rows count {num_held}")


def _describe(pages: NDArray[np.int64], pool: PagePool, cache: PrefixCache, table: RequestTable) -> str:
    """Return text with every owner of some pages, for an error message."""
    parts = []
    free = pool.free_mask()
    for page in pages.tolist():
        owners = ["free list"] if free[page] else []
        owners += [f"cache node {n.node_id}" for n in cache.walk() if page in n.pages]
        rows = np.flatnonzero(table.num_pages).tolist()
        owners += [f"row {r}" for r in rows if page in table.own_pages(r)]
        parts.append(f"{page}: {' and '.join(owners) or 'no owner'}")
    return "; ".join(parts)
