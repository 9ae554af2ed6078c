"""Conversion of a prefix cache's nodes to plain data for the dashboard."""

from itertools import islice
from typing import Any

from graftlm.contracts import NodeView, PrefixCache

__all__ = ["tree_view"]

#: Maximum number of nodes that are read. Reading more nodes would delay the steps.
_MAX_WALKED = 5_000
#: Maximum number of tokens that are returned per node.
_MAX_TOKENS = 32


def tree_view(cache: PrefixCache, limit: int, now_s: float) -> dict[str, Any]:
    """Return the largest nodes of a cache, with their ancestors.

    Args:
        limit: maximum number of nodes to return.
        now_s: the current time of the cache's clock, in seconds.

    Returns: {"nodes": [...], "total_nodes": n}, where n is the number of nodes in the cache, but at most 5,000.
    """
    nodes = {node.node_id: node for node in islice(cache.walk(), _MAX_WALKED)}
    chosen: dict[int, NodeView] = {}
    for node in sorted(nodes.values(), key=lambda n: len(n.pages), reverse=True):
        path = _path(node, nodes, chosen)
        if len(chosen) + len(path) > limit:
            break
        chosen |= {n.node_id: n for n in path}
    return {"nodes": [_plain(node, now_s) for node in chosen.values()], "total_nodes": len(nodes)}


def _path(node: NodeView, nodes: dict[int, NodeView], chosen: dict[int, NodeView]) -> list[NodeView]:
    """Return a node and its ancestors, except the nodes that are already in `chosen`."""
    path: list[NodeView] = []
    current: NodeView | None = node
    while current is not None and current.node_id not in chosen:
        path.append(current)
        current = None if current.parent_id is None else nodes.get(current.parent_id)
    return path


def _plain(node: NodeView, now_s: float) -> dict[str, Any]:
    stats = node.stats
    return {
        "id": node.node_id,
        "parent": node.parent_id,
        "namespace": node.namespace,
        "num_tokens": len(node.token_ids),
        "num_pages": len(node.pages),
        "num_locks": node.num_locks,
        "num_states": node.num_states,
        "age_s": round(max(0.0, now_s - stats.last_access), 3),
        "hits": stats.hits,
        "token_ids": node.token_ids[:_MAX_TOKENS].tolist(),
    }
