"""The index of cached texts: what it finds follows in a cached text, and its memory is bounded by the texts."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.contracts import PrefixKey
from graftlm.records import CacheEvent
from graftlm.testing import CacheRig
from graftlm_cache.radix import RadixCache
from graftlm_speculation.cached_texts import CachedTexts
from graftlm_speculation.text_index import TextIndex
from graftlm_speculation.text_segment import MAX_CAPACITY, MIN_CAPACITY

BYTES_PER_ELEMENT = 14.25


def ids(*values):
    return np.array(values, dtype=np.int32)


def numbers(first, last):
    return np.arange(first, last, dtype=np.int32)


def found(index, *latest, limit=4):
    num_matched, token_ids = index.following(ids(*latest), limit)
    return num_matched, token_ids.tolist()


def index_of(*texts, num_hashed=2, max_match=8):
    index = TextIndex(num_hashed, max_match)
    for i, text in enumerate(texts):
        index.store(i, None, ids(*text))
    return index


def test_the_tokens_after_a_match_are_found():
    index = index_of([1, 2, 3, 4, 5, 6])
    assert found(index, 9, 2, 3) == (2, [4, 5, 6])
    assert found(index, 1, 2, 3, limit=2) == (3, [4, 5])
    assert found(index, 9, 3) == (0, [])
    assert found(index, 3) == (0, [])
    assert found(index, 5, 6) == (0, []), "no token follows"
    assert found(TextIndex(2, 8), 1, 2) == (0, [])


def test_the_longest_match_counts_and_then_the_latest():
    index = index_of([1, 2, 3, 10], [7, 2, 3, 20], [8, 2, 3, 30])
    assert found(index, 7, 2, 3) == (3, [20])
    assert found(index, 0, 2, 3) == (2, [30])


def test_tokens_before_the_maximum_are_not_compared():
    index = index_of([1, 2, 3, 4, 10], [9, 2, 3, 4, 20], max_match=3)
    assert found(index, 1, 2, 3, 4) == (3, [20])


def test_a_match_reaches_into_the_node_before_and_is_continued_in_the_nodes_after():
    index = index_of([1, 2, 3, 4])
    index.store(1, 0, ids(5, 6))
    index.store(2, 1, ids(7, 8))
    index.store(3, 1, ids(9, 10))
    assert found(index, 3, 4, 5) == (3, [6, 9, 10])
    assert found(index, 2, 3, 4, limit=9) == (3, [5, 6, 9, 10])
    assert found(index, 2, 3, 4, 5, 6, 7) == (6, [8])
    index.remove(3)
    assert found(index, 3, 4, 5) == (3, [6, 7, 8])


def test_a_split_node_is_one_text():
    index = index_of([1, 2, 3, 4, 5, 6])
    index.split(0, 7, 4)
    index.store(8, 7, ids(15, 16))
    assert found(index, 2, 3, 4, 5) == (4, [6])
    assert found(index, 2, 3, 4) == (3, [15, 16])
    index.remove(8)
    assert found(index, 2, 3, 4) == (3, [5, 6])
    index.remove(0)
    assert found(index, 1, 2, 3) == (3, [4])
    assert found(index, 4, 5) == (0, [])
    index.remove(7)
    assert index.num_bytes == 0


def test_ids_of_images_are_not_returned():
    index = index_of([1, 2, 3, -77, 5], [6, 7, -1, 8])
    assert found(index, 1, 2) == (2, [3])
    assert found(index, 2, 3) == (0, [])
    assert found(index, 6, 7) == (0, [])


def test_unknown_nodes_are_refused():
    index = index_of([1, 2, 3])
    for call in (lambda: index.store(5, 4, ids(1)), lambda: index.remove(4), lambda: index.split(4, 5, 1)):
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize("node_len", [5, 300, 40_000, 150_000])
def test_all_places_of_a_long_text_are_found(node_len):
    """No sequence occurs twice; so almost all of them stay in the table."""
    num_tokens = max(2000, node_len)
    text = np.random.default_rng(0).permutation(num_tokens).astype(np.int32)
    index = TextIndex(4, 16)
    for i, start in enumerate(range(0, num_tokens, node_len)):
        index.store(i, i - 1 if i else None, text[start : start + node_len])
    places = random.Random(0).sample(range(20, num_tokens - 20), 200)
    num_right = 0
    for place in places:
        num_matched, following = index.following(text[:place], 15)
        num_right += num_matched == 16 and np.array_equal(following, text[place : place + 15])
    assert num_right >= 0.97 * len(places)


def test_the_latest_of_many_occurrences_are_in_the_table():
    index = TextIndex(2, 4)
    for i in range(500):
        index.store(i, None, ids(1, 2, 1000 + i))
    assert found(index, 1, 2) == (2, [1499])
    for i in range(499, 495, -1):
        index.remove(i)
    assert found(index, 1, 2) == (2, [1495])


def num_elements_of(index, num_nodes, num_tokens, max_match):
    assert index.num_bytes == pytest.approx(BYTES_PER_ELEMENT * index.num_elements)
    return max(2 * MIN_CAPACITY, 16 * (num_tokens + num_nodes * (1 + max_match)))


@pytest.mark.parametrize("node_len", [1, 20, 1000])
def test_memory_is_bounded_by_the_cached_tokens(node_len):
    draw, index, alive = random.Random(node_len), TextIndex(4, 16), []
    next_id = 0
    for target in (1000, 0, 2000, 30, 500, 3, 0):
        num_nodes = max(target // node_len, min(target, 1))
        while len(alive) < num_nodes:
            index.store(next_id, None, np.full(node_len, next_id % 50, dtype=np.int32))
            alive.append(next_id)
            next_id += 1
        while len(alive) > num_nodes:
            index.remove(alive.pop(draw.randrange(len(alive))))
        most = num_elements_of(index, num_nodes, num_nodes * node_len, 16)
        assert index.num_elements <= (most if num_nodes else 0)


def test_segments_that_are_mostly_removed_are_merged():
    index, size = TextIndex(4, 16), 1000
    num_nodes = 3 * MAX_CAPACITY // size
    for i in range(num_nodes):
        index.store(i, None, numbers(i * size, i * size + size))
    before = index.num_elements
    for i in range(num_nodes):
        if i % 8:
            index.remove(i)
    assert index.num_elements < before / 3
    for i in range(0, num_nodes, 8):
        start = i * size
        assert found(index, *range(start + 100, start + 120)) == (16, [*range(start + 120, start + 124)])


VOCAB = 3
TEXTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "insert", "match", "evict", "search"]), TEXTS), max_size=30
)


def paths_of(mirror):
    """Return the texts of a mirrored tree from the start of a prompt to each leaf."""

    def path(node):
        start = [] if node.parent_id is None else path(mirror.nodes[node.parent_id])
        return start + node.token_ids.tolist()

    return [path(node) for node in mirror.nodes.values() if not node.children]


def occurs(paths, part):
    return any(part == path[i : i + len(part)] for path in paths for i in range(len(path) - len(part) + 1))


@settings(deadline=None, max_examples=100)
@given(page_size=st.sampled_from([1, 2, 4]), num_hashed=st.integers(1, 3), events=EVENTS)
def test_what_is_found_follows_in_a_cached_text_after_any_history(page_size, num_hashed, events):
    rig, index = CacheRig(RadixCache, page_size), CachedTexts(num_hashed, 8)
    num_applied = 0
    for kind, text in events:
        key = PrefixKey(ids(*text))
        if kind == "insert":
            rig.insert(key)
        elif kind == "match":
            rig.cache.match(key)
        elif kind == "evict":
            rig.cache.evict(2)
        for event in rig.events[num_applied:]:
            index.apply(event)
        num_applied = len(rig.events)
        paths = paths_of(rig.mirror)
        for length in range(len(text)):
            num_matched, following = index.following("", ids(*text[:length]), 5)
            expected = [n for n in range(num_hashed, min(length, 8) + 1) if continues(paths, text[length - n : length])]
            if num_matched == 0:
                assert not len(following)
                continue
            assert num_matched in expected
            assert 1 <= len(following) <= 5
            assert occurs(paths, text[length - num_matched : length] + following.tolist())
    if not rig.mirror.nodes:
        assert index.num_bytes == 0


def continues(paths, part):
    return any(occurs(paths, [*part, token]) for token in range(VOCAB))


def test_events_of_a_cache_without_nodes_are_ignored():
    texts = CachedTexts(2, 8)
    texts.apply(CacheEvent("stored", 3, None, None, "", ids(1, 2, 3)))
    texts.apply(CacheEvent("removed", 3))
    assert len(texts) == texts.num_bytes == 0


def test_namespaces_are_separate_and_empty_ones_are_deleted():
    texts = CachedTexts(2, 8)
    for node_id, namespace in enumerate(["a", "b"]):
        texts.apply(CacheEvent("stored", 4, node_id, None, namespace, ids(1, 2, 3, 10 + node_id)))
    assert texts.following("a", ids(1, 2, 3), 4)[1].tolist() == [10]
    assert texts.following("b", ids(1, 2, 3), 4)[1].tolist() == [11]
    assert texts.following("c", ids(1, 2, 3), 4)[0] == 0
    texts.apply(CacheEvent("removed", 4, 0, None, "a"))
    assert len(texts) == 1
    assert texts.following("a", ids(1, 2, 3), 4)[0] == 0
    texts.apply(CacheEvent("cleared", 4))
    assert texts.num_bytes == 0
