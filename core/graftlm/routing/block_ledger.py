"""Converts the changes of a prefix cache's nodes to changes of blocks of a fixed length.

Nodes of a radix tree have any length in pages, and they are split. Routers and indexers outside the engine use blocks
of a fixed length. A cache holds a block if it holds all tokens up to the end of the block:

    tokens   0 ......... 64 ........ 128 ........ 192
    node 1   |------------------|                          holds block 0
    node 2                      |------------------|       below node 1: holds blocks 1 and 2
    split of node 1 at 80: no block changes; block 1 still ends in node 2
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.records import CacheEvent
from graftlm.routing.block_digests import BlockDigests
from graftlm.types import TokenIds

__all__ = ["BlockChange", "BlockLedger"]

_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A change of the blocks that a cache holds.

    Attributes:
        kind: "stored", "removed" or "cleared".
        digests: digests of the blocks, in the order of the prompt; empty for "cleared".
        parent: digest of the block before the first block; None for the first block of a prompt. Only for "stored".
        token_ids: int32 [blocks * block_tokens], the tokens of the blocks. Only for "stored".
        namespace: namespace of the blocks. Only for "stored".
    """

    kind: str
    digests: list[int] = field(default_factory=list)
    parent: int | None = None
    token_ids: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    namespace: str = ""


@dataclass(slots=True)
class _Node:
    """A node of the tree.

    Attributes:
        start: number of tokens before the node.
        token_ids: int32, the node's own tokens.
        before: digest of the last block that ends at or before `start`.
        digests: uint64, digests of the blocks that end in (start, end].
    """

    parent: "_Node | None"
    namespace: str
    start: int
    token_ids: TokenIds
    before: int
    digests: NDArray[np.uint64]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def last_digest(self) -> int:
        """Digest of the last block that ends at or before `end`."""
        return int(self.digests[-1]) if len(self.digests) else self.before


class BlockLedger:
    """A copy of a cache's tree, from which changes of blocks are computed.

    Args:
        block_tokens: number of tokens in a block, a multiple of the cache's page size. Otherwise several nodes could
            hold the same block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._digests = BlockDigests(block_tokens)
        self._nodes: dict[int, _Node] = {}

    def apply(self, event: CacheEvent) -> BlockChange | None:
        """Apply an event of the cache; return the change of its blocks, None if no block changed.

        Events of caches without nodes are ignored.

        Raises:
            KeyError: the event refers to an unknown node, so events are missing.
        """
        if event.kind == "cleared":
            self._nodes.clear()
            return BlockChange("cleared")
        if event.node_id is None:
            return None
        if event.kind == "stored":
            return self._store(event.node_id, event)
        if event.kind == "split":
            self._split(event.node_id, event)
            return None
        node = self._nodes.pop(event.node_id)
        return BlockChange("removed", node.digests.tolist()) if len(node.digests) else None

    def contents(self) -> list[BlockChange]:
        """Return the "stored" changes that describe the current blocks, parents before children."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.start)
        return [change for node in nodes if (change := self._stored(node)) is not None]

    def _store(self, node_id: int, event: CacheEvent) -> BlockChange | None:
        parent = None if event.parent_id is None else self._nodes[event.parent_id]
        start = 0 if parent is None else parent.end
        before = self._digests.start(event.namespace) if parent is None else parent.last_digest
        tokens = _NO_TOKENS if event.token_ids is None else np.array(event.token_ids)
        node = _Node(parent, event.namespace, start, tokens, before, np.empty(0, dtype=np.uint64))
        node.digests = self._digests.extend(self._block_tokens_of(node), start // self._block_tokens, before)
        self._nodes[node_id] = node
        return self._stored(node)

    def _stored(self, node: _Node) -> BlockChange | None:
        num_blocks = len(node.digests)
        if not num_blocks:
            return None
        parent = node.before if node.start >= self._block_tokens else None
        tokens = self._block_tokens_of(node)[: num_blocks * self._block_tokens]
        return BlockChange("stored", node.digests.tolist(), parent, tokens, node.namespace)

    def _split(self, node_id: int, event: CacheEvent) -> None:
        """Move the first tokens of a node to a new parent node."""
        lower, cut = self._nodes[node_id], event.num_tokens
        assert event.parent_id is not None, "a split names both nodes"
        num_upper = (lower.start + cut) // self._block_tokens - lower.start // self._block_tokens
        upper = _Node(
            lower.parent, lower.namespace, lower.start, lower.token_ids[:cut], lower.before, lower.digests[:num_upper]
        )
        lower.parent, lower.start, lower.before = upper, upper.end, upper.last_digest
        lower.token_ids, lower.digests = lower.token_ids[cut:], lower.digests[num_upper:]
        self._nodes[event.parent_id] = upper

    def _block_tokens_of(self, node: _Node) -> TokenIds:
        """Return the tokens from the last block end at or before the node's start to the node's end."""
        missing = node.start % self._block_tokens
        if not missing:
            return node.token_ids
        parts, above = [node.token_ids], node.parent
        while missing > 0 and above is not None:
            part = above.token_ids[-missing:]
            parts.append(part)
            missing -= len(part)
            above = above.parent
        return np.concatenate(parts[::-1])
