import itertools

import numpy as np
import pytest

from graftlm.contracts import NodeStats
from graftlm.testing import OldestAccessFirst
from graftlm_cache.leaf_heap import LeafHeap
from graftlm_cache.node import RadixNode

ROOT = RadixNode.root(0, "")


def leaf(last_access: float) -> RadixNode:
    return RadixNode(1, "", ROOT, bytes(4), bytes(4), NodeStats(created=0.0, last_access=last_access))


def test_pop_returns_the_leaf_with_the_lowest_current_priority():
    heap = LeafHeap(OldestAccessFirst())
    early, late = leaf(1.0), leaf(2.0)
    for node in (late, early):
        heap.touch(node)
    early.stats.last_access = 3.0
    assert [heap.pop(), heap.pop(), heap.pop()] == [late, early, None]


def test_a_touch_replaces_the_old_entry():
    heap = LeafHeap(OldestAccessFirst())
    first, second, third = leaf(1.0), leaf(2.0), leaf(3.0)
    for node in (first, second, third):
        heap.touch(node)
    assert heap.pop() is first
    second.stats.last_access = 4.0
    heap.touch(second)
    assert [heap.pop(), heap.pop(), heap.pop()] == [third, second, None]


def test_nodes_that_are_not_evictable_leaves_are_not_popped():
    heap = LeafHeap(OldestAccessFirst())
    locked, parent, kept = leaf(1.0), leaf(2.0), leaf(3.0)
    for node in (locked, parent, kept):
        heap.touch(node)
    locked.num_locks = 1
    parent.adopt(bytes(4), leaf(9.0))
    assert [heap.pop(), heap.pop()] == [kept, None]


def test_a_discarded_node_can_be_popped_again_after_a_touch():
    heap = LeafHeap(OldestAccessFirst())
    node, other = leaf(2.0), leaf(1.0)
    heap.touch(node)
    heap.touch(other)
    assert heap.pop() is other
    heap.discard(node)
    assert heap.pop() is None
    heap.touch(node)
    assert heap.pop() is node


def test_equal_priorities_are_popped_in_order_of_touch():
    heap = LeafHeap(OldestAccessFirst())
    nodes = [leaf(1.0) for _ in range(20)]
    for node in nodes:
        heap.touch(node)
    assert [heap.pop() for _ in nodes] == nodes


def test_stale_entries_are_removed():
    heap = LeafHeap(OldestAccessFirst())
    nodes = [leaf(float(idx)) for idx in range(100)]
    for node in nodes:
        heap.touch(node)
    for round_idx in range(100):
        for node in nodes[:20]:
            node.stats.last_access += 1000.0
            heap.touch(node)
        oldest = heap.pop()
        assert oldest is nodes[20], round_idx
        heap.touch(oldest)
        assert heap.num_entries <= 2 * len(nodes) + 64


class Answers(OldestAccessFirst):
    """Returns the answers of a list one after the other; raises those that are exceptions."""

    def __init__(self, answers):
        self.answers = itertools.cycle(answers)

    def priority(self, node):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "answers",
    [
        [(float("nan"),), (1.0,), (2.0,)],
        [(1.0,), ("text",), None],
        [(None,), (1.0, "x"), [1.0], 3.0],
        [(1j,), ((1.0,),), (2.0,)],
        [ValueError("no"), (1.0,)],
        [(10**400,), (float("inf"),), (-(10**400),), (1.0,)],
        [(np.float32(1.0),), (np.int64(-1),), (np.float64("nan"),)],
        [(), (1.0,), (1.0, 2.0)],
    ],
)
@pytest.mark.parametrize("num_leaves", [10, 700])
def test_invalid_priorities_of_a_strategy_lose_no_leaf(answers, num_leaves, caplog):
    heap = LeafHeap(Answers(answers))
    nodes = [leaf(1.0) for _ in range(num_leaves)]
    popped = []
    for number, node in enumerate(nodes):
        heap.touch(node)
        heap.touch(nodes[number // 2])
        if node in popped:
            popped.remove(node)
        heap.settle_many()
    while (node := heap.pop()) is not None:
        popped.append(node)
    assert len(popped) == num_leaves
    assert set(map(id, popped)) == set(map(id, nodes))
    assert len(caplog.records) <= 2


def test_leaves_without_a_valid_priority_are_popped_first():
    heap = LeafHeap(Answers([(-5.0,), (float("nan"),), None]))
    nodes = [leaf(1.0) for _ in range(3)]
    for node in nodes:
        heap.touch(node)
    assert [heap.pop(), heap.pop(), heap.pop()] == [nodes[1], nodes[2], nodes[0]]
