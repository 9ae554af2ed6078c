"""The ledger's blocks are the blocks of the cache's tree, for any sequence of changes."""

import random

import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.records import CacheEvent
from graftlm.routing import BlockDigests, BlockLedger
from graftlm.testing import OldestAccessFirst
from graftlm_cache.radix import RadixCache


class Held:
    """The blocks that a reader of the changes holds."""

    def __init__(self):
        self.blocks = {}  # digest -> (parent, tokens, namespace)

    def apply(self, change):
        if change.kind == "cleared":
            self.blocks.clear()
        elif change.kind == "removed":
            for digest in change.digests:
                del self.blocks[digest]
        else:
            parents = [change.parent, *change.digests]
            tokens = change.token_ids.reshape(len(change.digests), -1)
            for parent, digest, block in zip(parents, change.digests, tokens, strict=False):
                assert parent is None or parent in self.blocks
                assert digest not in self.blocks
                self.blocks[digest] = (parent, block.tolist(), change.namespace)


def blocks_of(cache, block_tokens):
    """Return the blocks of a cache's tree, computed from whole prefixes."""
    digests, prefixes, found = BlockDigests(block_tokens), {}, {}
    for node in cache.walk():
        above = prefixes.get(node.parent_id, np.empty(0, dtype=np.int32))
        tokens = prefixes[node.node_id] = np.concatenate([above, node.token_ids])
        names = digests.of_prompt(tokens, node.namespace)
        for number, (parent, digest) in enumerate(zip([None, *names], names, strict=False)):
            block = tokens[number * block_tokens : (number + 1) * block_tokens].tolist()
            found[digest] = (parent, block, node.namespace)
    return found


@pytest.mark.parametrize(("page_size", "block_tokens"), [(1, 1), (1, 8), (4, 4), (4, 16), (16, 16)])
def test_blocks_equal_those_of_the_tree_after_any_changes(page_size, block_tokens):
    draw = random.Random(f"{page_size} {block_tokens}")
    ledger, held = BlockLedger(block_tokens), Held()

    def listen(event):
        change = ledger.apply(event)
        if change is not None:
            held.apply(change)

    cache = RadixCache(CacheContext(page_size, OldestAccessFirst(), lambda: 0.0, on_event=listen))
    for _ in range(60):
        action = draw.random()
        if action < 0.75:
            tokens = np.array([draw.randrange(2) for _ in range(draw.randrange(1, 70))], dtype=np.int32)
            tokens[: draw.randrange(60)] = 7
            key = PrefixKey(tokens, draw.choice(["", "tenant"]))
            handle = cache.match(key).handle
            num_new = len(tokens) // page_size - handle.num_pages
            cache.insert(key, np.arange(num_new, dtype=np.int32), handle)
        elif action < 0.97:
            cache.evict(draw.randrange(1, 6))
        else:
            cache.reset()
        assert held.blocks == blocks_of(cache, block_tokens)
    again = Held()
    for change in ledger.contents():
        again.apply(change)
    assert again.blocks == held.blocks


def test_events_without_nodes_are_ignored_and_missing_events_are_noticed():
    ledger = BlockLedger(4)
    assert ledger.apply(CacheEvent("stored", 8, token_ids=np.zeros(8, dtype=np.int32))) is None
    with pytest.raises(KeyError):
        ledger.apply(CacheEvent("removed", 8, node_id=3))
