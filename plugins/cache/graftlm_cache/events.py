"""The events of the radix tree, from which an observer can mirror the tree."""

from graftlm.records import CacheEvent
from graftlm_cache.node import RadixNode

__all__ = ["parent_id", "removed_event", "split_event", "stored_event"]


def parent_id(node: RadixNode) -> int | None:
    """Return the id of a node's parent; None if the parent is a root."""
    parent = node.parent
    return parent.node_id if parent is not None and parent.num_pages else None


def stored_event(node: RadixNode) -> CacheEvent:
    """Return the event for a new node."""
    return CacheEvent("stored", node.stats.tokens, node.node_id, parent_id(node), node.namespace, node.token_ids)


def split_event(upper: RadixNode, lower: RadixNode) -> CacheEvent:
    """Return the event for a split: the first tokens of `lower` have moved to a new node `upper` above it."""
    return CacheEvent("split", upper.stats.tokens, lower.node_id, upper.node_id, lower.namespace)


def removed_event(node: RadixNode) -> CacheEvent:
    """Return the event for a leaf that was removed."""
    return CacheEvent("removed", node.stats.tokens, node.node_id, None, node.namespace)
