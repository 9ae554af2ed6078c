"""The view of a prefix cache has its largest nodes, each with the path from the root."""

import numpy as np
import pytest

from graftlm.contracts import CacheContext, EvictionContext, PrefixKey
from graftlm.processes.tree_view import tree_view
from graftlm.registry import Registry


@pytest.fixture
def cache():
    registry = Registry.load()
    eviction = registry.create("eviction", registry.provider("eviction", "lru"), {}, EvictionContext(1000, 1))
    context = CacheContext(1, eviction, lambda: 100.0)
    return registry.create("cache", registry.provider("cache", "radix"), {}, context)


def insert(cache, token_ids, first_page, namespace=""):
    key = PrefixKey(np.array(token_ids, dtype=np.int32), namespace)
    handle = cache.match(key).handle
    pages = np.arange(first_page, first_page + len(token_ids) - handle.num_pages, dtype=np.int32)
    cache.insert(key, pages, handle)


def test_an_empty_cache_has_no_nodes(cache):
    assert tree_view(cache, 10, 100.0) == {"nodes": [], "total_nodes": 0}


def test_nodes_have_their_tokens_and_parents(cache):
    insert(cache, range(50), 0)
    insert(cache, [*range(40), 90, 91], 100, namespace="")
    view = tree_view(cache, 10, 107.5)
    assert view["total_nodes"] == 3
    trunk = next(node for node in view["nodes"] if node["parent"] is None)
    assert (trunk["num_tokens"], trunk["num_pages"], trunk["age_s"]) == (40, 40, 7.5)
    assert trunk["token_ids"] == list(range(32))
    assert {node["parent"] for node in view["nodes"] if node is not trunk} == {trunk["id"]}


def test_the_largest_nodes_are_shown_with_all_their_parents(cache):
    for i in range(20):
        insert(cache, [0, 1, i + 10, *range(100 * i, 100 * i + 5 * i)], 100 * i)
    view = tree_view(cache, 6, 100.0)
    assert len(view["nodes"]) <= 6
    ids = {node["id"] for node in view["nodes"]}
    assert all(node["parent"] is None or node["parent"] in ids for node in view["nodes"])
    assert max(node["num_tokens"] for node in view["nodes"]) == 1 + 95
    assert view["total_nodes"] == 21
