"""Returns a prefix cache's content as plain data, for tools."""

from typing import Any

from graftlm.contracts import NodeView, PrefixCache

__all__ = ["SNAPSHOT_FORMAT", "cache_snapshot"]

#: Version of the format. It increases when the meaning of a field changes, but not when a field is added.
SNAPSHOT_FORMAT = 1


def cache_snapshot(cache: PrefixCache, page_size: int, now_s: float) -> dict[str, Any]:
    """Return all nodes of a cache as JSON-compatible data, parents before children.

    Args:
        now_s: reading of the cache's clock, in seconds.

    Returns: "format", "page_size", "evictable_pages", "locked_pages" and "nodes". Each node has "id", "parent" (null at
        the start of a prompt), "namespace", "token_ids", "pages", "locks", "pins", "states", "hits", "priority", and
        "created_s" and "last_access_s", in seconds before `now_s`.
    """
    return {
        "format": SNAPSHOT_FORMAT,
        "page_size": page_size,
        "evictable_pages": cache.evictable_pages,
        "locked_pages": cache.locked_pages,
        "nodes": [_plain(node, now_s) for node in cache.walk()],
    }


def _plain(node: NodeView, now_s: float) -> dict[str, Any]:
    stats = node.stats
    return {
        "id": node.node_id,
        "parent": node.parent_id,
        "namespace": node.namespace,
        "token_ids": node.token_ids.tolist(),
        "pages": node.pages.tolist(),
        "locks": node.num_locks,
        "pins": node.num_pins,
        "states": node.num_states,
        "hits": stats.hits,
        "priority": stats.priority,
        "created_s": round(max(0.0, now_s - stats.created), 6),
        "last_access_s": round(max(0.0, now_s - stats.last_access), 6),
    }
