"""A radix tree that groups waiting requests by common prefixes."""

from __future__ import annotations

import numpy as np

from graftlm.types import TokenIds

__all__ = ["PromptNode", "PromptTree"]

_TOKEN_BYTES = np.dtype(np.int32).itemsize


class PromptNode:
    """A node of the tree. If two or more requests share its prefix, it is a `graftlm.contracts.PrefixGroup`.

    Attributes:
        run: the tokens between the parent's prefix and this node's, as bytes of int32, in whole pages; empty only for a
            root.
        num_tokens: number of tokens in the node's prefix, from the start of the prompt to the end of the run.
        num_waiting: number of requests that end at or below this node.
    """

    __slots__ = ("_parent", "children", "num_tokens", "num_waiting", "run")

    def __init__(self, parent: PromptNode | None, run: bytes) -> None:
        self._parent = parent
        self.children: dict[bytes, PromptNode] = {}  # first page's bytes -> child
        self.run = run
        self.num_tokens: int = len(run) // _TOKEN_BYTES + (0 if parent is None else parent.num_tokens)
        self.num_waiting = 0

    @property
    def parent(self) -> PromptNode | None:
        """The group of the parent node; None if the parent is a root, because a root has no common tokens."""
        return self._parent if self._parent is not None and self._parent.num_tokens else None

    @property
    def group(self) -> PromptNode | None:
        """The smallest group of a request that ends here: this node, or the parent if this node has one request."""
        return self if self.num_waiting > 1 and self.num_tokens else self.parent

    @property
    def above(self) -> PromptNode | None:
        """The parent node, which may be a root; None for a root."""
        return self._parent

    def split(self, num_bytes: int, page_bytes: int) -> PromptNode:
        """Move the first `num_bytes` of the run to a new parent node, and return the new node."""
        upper = PromptNode(self._parent, self.run[:num_bytes])
        upper.num_waiting = self.num_waiting
        self._replace_by(upper, page_bytes)
        self._parent, self.run = upper, self.run[num_bytes:]
        upper.children[self.run[:page_bytes]] = self
        return upper

    def merge_into_child(self, page_bytes: int) -> None:
        """Remove this node, which has one child and no requests that end here; put its run before the child's run."""
        (child,) = self.children.values()
        child._parent, child.run = self._parent, self.run + child.run
        self._replace_by(child, page_bytes)

    def _replace_by(self, other: PromptNode, page_bytes: int) -> None:
        if self._parent is not None:
            self._parent.children[other.run[:page_bytes]] = other


class PromptTree:
    """The radix tree. A run is compared in one comparison of bytes.

        root ─┬─ [few-shot examples] ─┬─ [question 1]
              │                       └─ [question 2]
              └─ [another prompt]

    Below a root, an inner node has at least two requests: a node without requests and with one child is merged into it.
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[str, PromptNode] = {}  # namespace -> root; a root has at least one request

    def __len__(self) -> int:
        """Return the number of requests in the tree."""
        return sum(root.num_waiting for root in self._roots.values())

    def add(self, token_ids: TokenIds, namespace: str) -> PromptNode:
        """Add a request; return the node where its whole pages end."""
        page_bytes = self._page_bytes
        tokens = token_ids.tobytes()
        end = len(tokens) - len(tokens) % page_bytes
        node = self._roots.setdefault(namespace, PromptNode(None, b""))
        offset = 0
        while offset < end:
            node.num_waiting += 1
            edge = tokens[offset : offset + page_bytes]
            child = node.children.get(edge)
            if child is None:
                child = node.children[edge] = PromptNode(node, tokens[offset:end])
            elif not tokens.startswith(child.run, offset, end):
                child = child.split(_common_bytes(child.run, tokens[offset:end], page_bytes), page_bytes)
            node = child
            offset += len(node.run)
        node.num_waiting += 1
        return node

    def remove(self, node: PromptNode, namespace: str) -> None:
        """Remove a request of a namespace that ends at `node`."""
        step: PromptNode | None = node
        while step is not None:
            step.num_waiting -= 1
            above = step.above
            if above is not None:
                self._tidy(step, above)
            step = above
        if not self._roots[namespace].num_waiting:
            del self._roots[namespace]

    def _tidy(self, node: PromptNode, above: PromptNode) -> None:
        """Remove a node without requests, or merge it into its only child if no request ends at the node itself."""
        if not node.num_waiting:
            del above.children[node.run[: self._page_bytes]]
        elif len(node.children) == 1:
            (child,) = node.children.values()
            if child.num_waiting == node.num_waiting:
                node.merge_into_child(self._page_bytes)


def _common_bytes(run: bytes, other: bytes, page_bytes: int) -> int:
    """Return the length in bytes of the common whole pages at the start of two different runs."""
    num_compared = min(len(run), len(other))
    differs = np.frombuffer(run[:num_compared], np.uint8) != np.frombuffer(other[:num_compared], np.uint8)
    first = int(differs.argmax()) if differs.any() else num_compared
    return first - first % page_bytes
