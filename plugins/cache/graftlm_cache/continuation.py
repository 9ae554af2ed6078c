"""The tokens that follow a prefix in a radix tree."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from graftlm.types import TokenIds
from graftlm_cache.node import ITEM_BYTES, RadixNode

__all__ = ["NO_TOKENS", "find_continuation"]

#: No tokens: int32, shape [0].
NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False

#: Maximum number of a node's children that are compared: the children that were added last. The tokens after a node
#: with more children are hard to predict.
_MAX_COMPARED: Final = 256


def find_continuation(root: RadixNode, tokens: bytes, num_tokens: int, page_bytes: int) -> TokenIds:
    """Return up to `num_tokens` tokens that follow a prefix in the tree; change nothing.

    At each node with several children that fit, the tokens of the most recently used child are returned.

    Args:
        tokens: bytes of int32 token ids, from the start of the prompt; they may end inside a page.
        page_bytes: number of bytes of a page's token ids.

    Returns: int32 [m], read-only; empty if the tree does not contain the tokens, or no tokens after them.
    """
    node, rest = _descend(root, tokens, page_bytes)
    if node is None:
        return NO_TOKENS
    parts, num_bytes = [rest], len(rest)
    while num_bytes < num_tokens * ITEM_BYTES and (child := _latest(_recent(node))) is not None:
        parts.append(child.run)
        num_bytes += len(child.run)
        node = child
    return np.frombuffer(b"".join(parts)[: num_tokens * ITEM_BYTES], np.int32)


def _descend(node: RadixNode, tokens: bytes, page_bytes: int) -> tuple[RadixNode | None, bytes]:
    """Return the node in which `tokens` end, and the part of the node's run after that point.

    Returns (None, b"") if the tree does not contain `tokens`.
    """
    offset, end = 0, len(tokens)
    while offset < end:
        if end - offset >= page_bytes:
            child = node.children.get(tokens[offset : offset + page_bytes])
        else:
            start = tokens[offset:]
            child = _latest(child for child in _recent(node) if child.run.startswith(start))
        if child is None:
            return None, b""
        if offset + len(child.run) >= end:
            used = end - offset
            return (child, child.run[used:]) if child.run.startswith(tokens[offset:]) else (None, b"")
        if not tokens.startswith(child.run, offset):
            return None, b""
        offset += len(child.run)
        node = child
    return node, b""


def _recent(node: RadixNode) -> Iterator[RadixNode]:
    """Yield the children of a node that are compared, the child that was added last first."""
    return islice(reversed(node.children.values()), _MAX_COMPARED)


def _latest(nodes: Iterable[RadixNode]) -> RadixNode | None:
    """Return the most recently used of the nodes; None if there are none."""
    return max(nodes, key=lambda node: node.stats.last_access, default=None)
