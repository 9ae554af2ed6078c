"""Builds a copy of a cache's tree from the cache's events, as an indexer outside the engine would."""

from dataclasses import dataclass, field

import numpy as np

from graftlm.records import CacheEvent
from graftlm.types import TokenIds

__all__ = ["EventMirror", "MirroredNode"]


@dataclass(slots=True)
class MirroredNode:
    """One node of the copied tree.

    Attributes:
        parent_id: id of the parent; None for a node at the start of a prompt.
        namespace: namespace of the node's prompts.
        token_ids: the node's own tokens, int32.
        children: ids of the node's children.
    """

    parent_id: int | None
    namespace: str
    token_ids: TokenIds
    children: set[int] = field(default_factory=set)


class EventMirror:
    """A copy of a cache's tree, built from `CacheEvent`s in order. An inconsistent event raises AssertionError.

    Attributes:
        nodes: node id -> node; the same nodes as those that the cache's `walk` yields.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, MirroredNode] = {}

    def __call__(self, event: CacheEvent) -> None:
        """Apply one event."""
        {"stored": self._store, "split": self._split, "removed": self._remove, "cleared": self._clear}[event.kind](
            event
        )

    def _store(self, event: CacheEvent) -> None:
        assert event.node_id is not None, "a stored node has an id"
        assert event.node_id not in self.nodes, "a node is stored twice"
        assert event.token_ids is not None, "a stored node has tokens"
        assert len(event.token_ids) == event.num_tokens, "num_tokens is not the node's tokens"
        if event.parent_id is not None:
            self.nodes[event.parent_id].children.add(event.node_id)
        self.nodes[event.node_id] = MirroredNode(event.parent_id, event.namespace, np.array(event.token_ids))

    def _split(self, event: CacheEvent) -> None:
        assert event.node_id is not None and event.parent_id is not None, "a split names both halves"  # noqa: PT018
        lower, cut = self.nodes[event.node_id], event.num_tokens
        assert 0 < cut < len(lower.token_ids), "a split leaves tokens on both sides"
        upper = MirroredNode(lower.parent_id, lower.namespace, lower.token_ids[:cut], {event.node_id})
        if lower.parent_id is not None:
            siblings = self.nodes[lower.parent_id].children
            siblings.remove(event.node_id)
            siblings.add(event.parent_id)
        lower.parent_id, lower.token_ids = event.parent_id, lower.token_ids[cut:]
        self.nodes[event.parent_id] = upper

    def _remove(self, event: CacheEvent) -> None:
        assert event.node_id is not None, "a removed node has an id"
        node = self.nodes.pop(event.node_id)
        assert not node.children, "a node with children is removed"
        assert len(node.token_ids) == event.num_tokens, "num_tokens is not the node's tokens"
        if node.parent_id is not None:
            self.nodes[node.parent_id].children.remove(event.node_id)

    def _clear(self, event: CacheEvent) -> None:
        assert event.num_tokens == sum(len(node.token_ids) for node in self.nodes.values()), "cleared tokens differ"
        self.nodes.clear()
