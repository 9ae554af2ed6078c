from graftlm.contracts import NodeStats
from graftlm.testing import OldestAccessFirst
from graftlm_cache.leaf_heap import LeafHeap
from graftlm_cache.node import RadixNode

ROOT = RadixNode.root(0, "")


def leaf(last_access: float) -> RadixNode:
    return RadixNode(1, "", ROOT, bytes(4), bytes(4), NodeStats(created=0.0, last_access=last_access))


def test_pops_the_lowest_priority_of_the_moment():
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


def test_what_is_no_evictable_leaf_is_not_popped():
    heap = LeafHeap(OldestAccessFirst())
    locked, parent, kept = leaf(1.0), leaf(2.0), leaf(3.0)
    for node in (locked, parent, kept):
        heap.touch(node)
    locked.num_locks = 1
    parent.adopt(bytes(4), leaf(9.0))
    assert [heap.pop(), heap.pop()] == [kept, None]


def test_a_discarded_node_returns_with_a_touch():
    heap = LeafHeap(OldestAccessFirst())
    node, other = leaf(2.0), leaf(1.0)
    heap.touch(node)
    heap.touch(other)
    assert heap.pop() is other
    heap.discard(node)
    assert heap.pop() is None
    heap.touch(node)
    assert heap.pop() is node


def test_equal_priorities_go_in_the_order_they_were_touched():
    heap = LeafHeap(OldestAccessFirst())
    nodes = [leaf(1.0) for _ in range(20)]
    for node in nodes:
        heap.touch(node)
    assert [heap.pop() for _ in nodes] == nodes


def test_stale_entries_are_swept_out():
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
