"""The content hashes that name blocks in the lower tiers."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from graftlm.contracts import PrefixKey
from graftlm.types import TokenIds

__all__ = ["BlockKeys"]

_DIGEST_BYTES = 32
_MEMO_SIZE = 64


@dataclass(slots=True)
class _Chain:
    """The whole blocks of a token sequence: a copy of their tokens, and their keys."""

    token_ids: TokenIds
    keys: list[bytes]


class BlockKeys:
    """Computes the keys of a prefix's whole blocks.

    A block's key is the blake2b hash of the previous block's key and the block's tokens. For the first block, the
    namespace replaces the previous key. So equal keys mean equal tokens from the start of the prompt, in the same
    namespace, also in different engines. The hash is cryptographic, so that no client can construct a prompt that
    matches another prompt's blocks.

    The keys of the most recent prompts are stored. If a prompt returns with more tokens, only new blocks are hashed.

    Args:
        block_tokens: number of tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._memo: OrderedDict[bytes, _Chain] = OrderedDict()  # key of the first block -> chain

    def of(self, key: PrefixKey) -> list[bytes]:
        """Return the keys of a prefix's whole blocks, in order. The caller must not change the list."""
        size = self._block_tokens
        num_blocks = len(key.token_ids) // size
        if num_blocks == 0:
            return []
        tokens = key.token_ids[: num_blocks * size]
        first = _digest(_seed(key.namespace), tokens[:size])
        chain = self._memo.get(first)
        known = 1 if chain is None else _num_shared_blocks(chain.token_ids, tokens, size)
        keys = [first] if chain is None else chain.keys[:known]
        if known == num_blocks:
            return keys
        for start in range(known * size, len(tokens), size):
            keys.append(_digest(keys[-1], tokens[start : start + size]))
        self._memo[first] = _Chain(tokens.copy(), keys)
        self._memo.move_to_end(first)
        if len(self._memo) > _MEMO_SIZE:
            self._memo.popitem(last=False)
        return keys[:]


def _seed(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, person=b"graftlm-seed").digest()


def _digest(parent: bytes, token_ids: TokenIds) -> bytes:
    tokens = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES, person=b"graftlm-block").digest()


def _num_shared_blocks(a: TokenIds, b: TokenIds, size: int) -> int:
    """Return the number of equal leading blocks of two sequences."""
    end = min(len(a), len(b))
    differs = a[:end] != b[:end]
    return (int(differs.argmax()) if differs.any() else end) // size
