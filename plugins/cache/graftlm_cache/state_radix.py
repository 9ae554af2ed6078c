"""The radix prefix cache for models with a recurrent state: a match ends where a state is stored."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graftlm.contracts import (
    CacheContext,
    NodeView,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
    StateView,
)
from graftlm.types import PageIds
from graftlm_cache.node import ITEM_BYTES, RadixNode, common_pages, join_pages
from graftlm_cache.radix import RadixCache

__all__ = ["StateRadixCache"]


@dataclass(frozen=True, slots=True)
class _Probed:
    """The result of a probe, valid for this version of the cache."""

    num_pages: int
    version: int


class StateRadixCache(RadixCache):
    """A radix cache whose matches end at the last cached page at whose end a recurrent state is stored.

        keys and values  [======== 8 ========]──[==== 12 ====]──[== 15 ==]
        states                   ^5                     ^11
        a match may end at       5                       11                   the keys and values end at 15

    States are stored for pages, so splits of nodes do not affect them. A request whose keys and values are cached
    further than its match computes the tokens between again, because a state contains all tokens before it.

    Args:
        context: see `CacheContext`.
        states: view of the stored states.
        interval_tokens: see `PrefixCache.state_interval_tokens`.
    """

    def __init__(self, context: CacheContext, states: StateView, interval_tokens: int | None = None) -> None:
        super().__init__(context)
        self._states = states
        self._interval_tokens = interval_tokens

    @property
    def state_interval_tokens(self) -> int | None:
        """Maximum distance in tokens between the states that are stored within a prompt; None: no maximum."""
        return self._interval_tokens

    @property
    def version(self) -> int:
        """A counter that increases whenever the result of a `probe` may have changed."""
        return self._version + self._states.version

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix at whose end a state is stored; see `PrefixCache.match`.

        Raises:
            InvariantError: `resume` is invalid, or the key is malformed.
        """
        start = self._start(resume, key.namespace)
        found = self._found_pages(start, self._whole_pages(key))
        num_pages = start.num_pages + self._usable(found)
        usable = replace(key, token_ids=key.token_ids[: num_pages * self._page_size])
        match = super().match(usable, resume)
        match.found_pages = start.num_pages + len(found)
        return match

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find; change nothing."""
        root = self._roots.get(key.namespace)
        return 0 if root is None else self._usable(self._found_pages(root, self._whole_pages(key)))

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Return where a match would end: in O(1) if nothing changed, otherwise by a probe from the start."""
        version = self.version
        if isinstance(place, _Probed) and place.version == version:
            return place
        num_pages = self.probe(key)
        return _Probed(num_pages, version) if num_pages else None

    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children. The cache must not change meanwhile; the arrays are read-only."""
        for view in super().walk():
            yield replace(view, num_states=int(np.count_nonzero(self._states.holds(view.pages))))

    def _found_pages(self, node: RadixNode, tokens: bytes) -> PageIds:
        """Return the cached pages of a key after `node`, whether or not states are stored; change nothing."""
        page_bytes = self._page_bytes
        offset = node.num_pages * page_bytes
        runs: list[bytes] = []
        while (child := node.children.get(tokens[offset : offset + page_bytes])) is not None:
            if not tokens.startswith(child.run, offset):
                num_pages = common_pages(child.run, tokens, offset, page_bytes)
                runs.append(child.pages[: num_pages * ITEM_BYTES])
                break
            runs.append(child.pages)
            offset += len(child.run)
            node = child
        return join_pages(runs)

    def _usable(self, pages: PageIds) -> int:
        """Return the number of pages up to the last page at whose end a state is stored."""
        places = np.flatnonzero(self._states.holds(pages))
        return int(places[-1]) + 1 if len(places) else 0
