import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graftlm.contracts import EvictionContext, NodeStats
from graftlm_eviction.slru import SegmentedLRU, SegmentedLRUOptions


def segments(protected_tokens: int) -> SegmentedLRU:
    """Return a strategy that protects this number of tokens, of twice as many."""
    context = EvictionContext(total_pages=2 * protected_tokens, page_size=1)
    return SegmentedLRU(SegmentedLRUOptions(protected_share=0.5), context)


class Nodes:
    """Nodes that are inserted and hit, one event per second."""

    def __init__(self, strategy: SegmentedLRU) -> None:
        self.strategy = strategy
        self.now = 0.0
        self.all: list[NodeStats] = []

    def insert(self, tokens: int = 1, hits: int = 0) -> NodeStats:
        self.now += 1.0
        node = NodeStats(created=self.now, last_access=self.now, hits=hits, tokens=tokens)
        self.strategy.on_insert(node)
        self.all.append(node)
        return node

    def hit(self, node: NodeStats) -> None:
        self.now += 1.0
        node.last_access = self.now
        node.hits += 1
        self.strategy.on_hit(node)

    def order(self) -> list[NodeStats]:
        return sorted(self.all, key=self.strategy.priority)

    def protected_tokens(self) -> int:
        return sum(node.tokens for node in self.all if self.strategy.is_protected(node))


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(segments(protected_tokens=4))


def test_a_scan_of_any_length_is_evicted_before_hit_nodes(nodes):
    kept = nodes.insert()
    nodes.hit(kept)
    scan = [nodes.insert() for _ in range(1000)]
    assert nodes.order() == [*scan, kept]


def test_probation_is_ordered_by_latest_access(nodes):
    first, second, third = (nodes.insert() for _ in range(3))
    first.last_access = 10.0  # inserted again, which is not a hit
    assert nodes.order() == [second, third, first]


def test_protected_nodes_are_ordered_by_their_latest_hit(nodes):
    first, second = nodes.insert(), nodes.insert()
    nodes.hit(second)
    nodes.hit(first)
    assert nodes.order() == [second, first]


def test_a_full_segment_demotes_its_least_recently_hit_node_to_the_end_of_probation(nodes):
    demoted, old, *others = [nodes.insert() for _ in range(6)]
    for node in [demoted, *others]:
        nodes.hit(node)
    young = nodes.insert()
    assert not nodes.strategy.is_protected(demoted)
    assert all(nodes.strategy.is_protected(node) for node in others)
    assert nodes.order() == [old, demoted, young, *others]


def test_a_node_with_constant_hits_does_not_demote_others():
    nodes = Nodes(segments(protected_tokens=100))
    others = [nodes.insert() for _ in range(50)]
    system_prompt = nodes.insert(tokens=10)
    for node in others:
        nodes.hit(node)
    for _ in range(1000):
        nodes.hit(system_prompt)
    assert all(nodes.strategy.is_protected(node) for node in nodes.all)


def test_a_node_larger_than_the_segment_stays_on_probation(nodes):
    kept = nodes.insert()
    nodes.hit(kept)
    large = nodes.insert(tokens=5)
    nodes.hit(large)
    assert nodes.order() == [large, kept]


@pytest.mark.parametrize(("hits", "is_protected"), [(0, False), (3, True)])
def test_the_upper_half_of_a_split_is_protected_if_the_whole_was_hit(nodes, hits, is_protected):
    assert nodes.strategy.is_protected(nodes.insert(hits=hits)) == is_protected


HAPPENINGS = st.lists(
    st.one_of(st.tuples(st.just("insert"), st.integers(1, 20)), st.tuples(st.just("hit"), st.integers(0, 99)))
)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), HAPPENINGS)
def test_the_protected_tokens_never_exceed_the_share(protected_tokens, happenings):
    nodes = Nodes(segments(protected_tokens))
    for what, number in happenings:
        if what == "insert":
            nodes.insert(tokens=number)
        elif nodes.all:
            nodes.hit(nodes.all[number % len(nodes.all)])
        assert nodes.protected_tokens() <= protected_tokens


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 1.5, "most"])
def test_a_share_with_an_empty_segment_is_refused(share):
    with pytest.raises(ValidationError, match="protected_share"):
        SegmentedLRUOptions(protected_share=share)
