"""A table of whole prefixes shares pages only at the ends of earlier prefixes, and loses no page."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from graftlm import Engine
from graftlm.contracts import CacheContext, PrefixKey
from graftlm.errors import InvariantError
from graftlm_eviction.lru import LRU

SOURCE = Path(__file__).parents[2] / "benchmarks" / "flat_table.py"


@pytest.fixture(scope="module")
def flat_table():
    spec = importlib.util.spec_from_file_location("benchmarks_flat_table", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(flat_table):
    """A table with pages of two tokens, whose clock advances at each reading."""
    times = iter(range(1000))
    return flat_table.WholePrefixTable(CacheContext(2, LRU(), lambda: float(next(times))))


def key(letters, namespace=""):
    """Return a key with one page per letter."""
    return PrefixKey(np.repeat(np.array([ord(letter) for letter in letters], dtype=np.int32), 2), namespace)


def pages(*ids):
    return np.array(ids, dtype=np.int32)


def insert(table, letters, *ids, handle=None):
    return table.insert(key(letters), pages(*ids), handle or table.match(key("")).handle)


def test_only_whole_prefixes_are_found(table):
    insert(table, "abc", 0, 1, 2)
    insert(table, "ab", 3, 4)
    cases = {"abc": [0, 1, 2], "abcd": [0, 1, 2], "abx": [3, 4], "ab": [3, 4], "ax": [], "a": [], "xabc": []}
    assert {letters: table.match(key(letters)).pages.tolist() for letters in cases} == cases
    assert {letters: table.probe(key(letters)) for letters in cases} == {k: len(v) for k, v in cases.items()}
    assert table.probe(key("abc", "other")) == 0


def test_a_longer_entry_shares_the_pages_of_its_prefix(table):
    first = insert(table, "ab", 0, 1)
    longer = insert(table, "abc", 2, handle=first.handle)
    assert longer.pages.tolist() == [2]
    assert table.match(key("abcd")).pages.tolist() == [0, 1, 2]
    assert table.match(key("abcd"), resume=first.handle).pages.tolist() == [2]
    assert sorted(page for node in table.walk() for page in node.pages.tolist()) == [0, 1, 2]


def test_pages_of_existing_entries_stay_with_the_caller(table):
    start = table.match(key("")).handle
    first = insert(table, "ab", 0, 1)
    again = insert(table, "ab", 5, 6)
    assert (again.existing_pages, again.cached_pages, again.pages.tolist()) == (2, 2, [0, 1])
    insert(table, "abc", 2, 3, 4, handle=start)
    refused = insert(table, "abc", 7, handle=first.handle)  # "abc" exists, but it does not continue this "ab"
    assert (refused.existing_pages, refused.cached_pages, refused.handle) == (2, 2, first.handle)
    assert table.evictable_pages == 5


def test_eviction_takes_the_least_recently_used_unlocked_entry(table):
    first = insert(table, "ab", 0, 1)
    longer = insert(table, "abc", 2, handle=first.handle)
    insert(table, "x", 3)
    table.lock(longer.handle)
    assert (table.evictable_pages, table.locked_pages) == (1, 3)
    assert table.evict(4).tolist() == [3]
    table.unlock(longer.handle)
    assert (table.evictable_pages, table.locked_pages) == (3, 0)
    assert table.evict(1).tolist() == [2]
    assert table.evict(2).tolist() == [0, 1]
    assert table.evict(1).tolist() == []
    assert list(table.walk()) == []


def test_reset_keeps_locked_entries(table):
    table.lock(insert(table, "ab", 0, 1).handle)
    insert(table, "x", 2)
    version = table.version
    assert table.reset().tolist() == [2]
    assert table.version > version
    assert table.match(key("ab")).pages.tolist() == [0, 1]


def test_an_unlock_without_a_lock_is_an_error(table):
    handle = insert(table, "a", 0).handle
    with pytest.raises(InvariantError, match="unlock without a lock"):
        table.unlock(handle)
    with pytest.raises(InvariantError, match="str is no handle"):
        table.lock("a")


def test_an_engine_with_the_table_generates_the_same_tokens_and_loses_no_page(flat_table, checkpoint):
    rng = np.random.default_rng(0)
    prefixes = rng.integers(5, 200, (3, 40)).tolist()
    prompts = [prefixes[i % 3] + rng.integers(5, 200, 1 + i).tolist() for i in range(12)]
    texts = {}
    for cache in ("chunk", "whole_prefix_table"):
        with Engine(
            model=str(checkpoint("llama")),
            plugins=[flat_table.TablePlugin()],
            cache={"name": cache, "page_size": 4},
            memory={"kv_tokens": 256},
            debug=True,
        ) as engine:
            engine.generate(prefixes, {"max_tokens": 1})
            outputs = engine.generate(prompts, {"temperature": 0, "max_tokens": 6, "ignore_eos": True})
            longer = [
                prompt + list(output.completions[0].token_ids) + [7]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]
            outputs += engine.generate(longer, {"temperature": 0, "max_tokens": 6, "ignore_eos": True})
            texts[cache] = [list(output.completions[0].token_ids) for output in outputs]
            cached, evicted = engine.stats().cached_tokens, engine.stats().evicted_pages
    assert texts["whole_prefix_table"] == texts["chunk"]
    assert cached >= 40 * 6
    assert evicted > 0
