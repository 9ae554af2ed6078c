"""The texts in the prefix cache, by namespace."""

from graftlm.records import CacheEvent
from graftlm.types import TokenIds
from graftlm_speculation.text_index import TextIndex

__all__ = ["CachedTexts"]


class CachedTexts:
    """Mirrors the texts of the prefix cache from its events, and finds what followed a sequence of tokens in them.

    Each namespace has its own index. A search reads one index, so the other namespaces affect neither its result nor
    its time.

    Args:
        min_match: minimum number of tokens of a match, at least 1.
        max_match: maximum number of tokens that are compared, at least `min_match`.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._indices: dict[str, TextIndex] = {}

    def __len__(self) -> int:
        """Return the number of namespaces with cached texts."""
        return len(self._indices)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays of all indices in bytes."""
        return sum(index.num_bytes for index in self._indices.values())

    def apply(self, event: CacheEvent) -> None:
        """Apply an event of the cache.

        Raises:
            KeyError: the event refers to a node that no earlier event has stored.
        """
        namespace, node_id = event.namespace, event.node_id
        if event.kind == "cleared":
            self._indices.clear()
        elif node_id is None:  # a cache without nodes cannot report what it removes
            return
        elif event.kind == "stored" and event.token_ids is not None:
            if namespace not in self._indices:
                self._indices[namespace] = TextIndex(self._min_match, self._max_match)
            self._indices[namespace].store(node_id, event.parent_id, event.token_ids)
        elif event.kind == "split" and event.parent_id is not None:
            self._indices[namespace].split(node_id, event.parent_id, event.num_tokens)
        elif event.kind == "removed":
            self._indices[namespace].remove(node_id)
            if not len(self._indices[namespace]):
                del self._indices[namespace]

    def following(self, namespace: str, token_ids: TokenIds, limit: int) -> tuple[int, TokenIds]:
        """Return the length of the longest match in a namespace, and the tokens after it; see `TextIndex.following`."""
        index = self._indices.get(namespace)
        return (0, token_ids[:0]) if index is None else index.following(token_ids, limit)
