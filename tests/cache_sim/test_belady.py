"""The offline optimum is compared with exhaustive search, and with the hits of real caches."""

import json
import random
from functools import cache
from itertools import combinations

import pytest

from graftlm.cache_sim import (
    Choice,
    Optimum,
    PageTree,
    Study,
    Trace,
    TraceRequest,
    offline_optimum,
    parse_capacities,
    parse_trace,
)

BLOCK = 4


def random_paths(seed, num_requests=7, num_blocks=3, depth=3):
    """Return paths of a small tree; an id identifies its whole path, as in recorded traces."""
    draw = random.Random(seed)
    paths = []
    for _ in range(num_requests):
        path = []
        for _ in range(draw.randint(1, depth)):
            path.append((path[-1] if path else 0) * 10 + draw.randint(1, num_blocks))
        paths.append(path)
    return paths


def with_outputs(seed, paths):
    """Return a trace in which the last part of each path is an output; it may begin within a block."""
    draw = random.Random(seed)
    lines = []
    for i, path in enumerate(paths):
        num_tokens = BLOCK * len(path)
        prompt = draw.randint(1, num_tokens)
        whole = prompt // BLOCK
        line = {"timestamp": i, "input_length": prompt, "output_length": num_tokens - prompt + 1, "block_tokens": BLOCK}
        line["hash_ids"] = path[:whole] + [999] * (prompt % BLOCK > 0)
        line["output_hash_ids"] = path[whole:]
        lines.append(json.dumps(line).encode())
    return parse_trace(lines, "here")


def with_tails(make_trace, paths):
    """Return a trace whose prompts continue after their last whole block, so that all whole blocks can be hits."""
    return make_trace(*([*path, 1000 + i] for i, path in enumerate(paths)), tail=1)


def best_by_trying(tree: PageTree, capacity: int, in_flight: int, *, prefixes: bool) -> int:
    """Return the maximum number of hits over all choices of pages to keep.

    Args:
        prefixes: keep a page only together with all before it, as caches must; otherwise keep any set of pages.
    """
    pages_of = [[(node, i) for node in path.nodes for i in range(tree.node_pages[node])] for path in tree.paths]
    before = {pages[i]: pages[i - 1] for pages in pages_of for i in range(1, len(pages))}

    @cache
    def best(index: int, held: frozenset) -> int:
        if index == len(pages_of):
            return 0
        pages = frozenset(pages_of[index])
        if len(pages) > capacity:
            return best(index + 1, held)
        hits = len(held.intersection(pages_of[index][: tree.paths[index].prompt_pages]))
        needed = pages | in_use(index, pages)
        return hits + max(best(index + 1, kept) for kept in choices(needed, held - needed))

    def choices(needed: frozenset, others: frozenset):
        for num_kept in range(min(capacity - len(needed), len(others)), -1, -1):
            for some in combinations(sorted(others), num_kept):
                kept = needed.union(some)
                if not prefixes or all(before.get(page, page) in kept for page in kept):
                    yield kept
            if not prefixes:
                return  # keeping fewer pages is never better

    def in_use(index: int, pages: frozenset) -> frozenset:
        """Return the pages of earlier requests; if the capacity is too small for all of them, the oldest have ended."""
        started = [frozenset(p) for p in pages_of[:index] if len(p) <= capacity]
        running = started[max(len(started) - in_flight, 0) :] if in_flight else []
        while running and len(pages.union(*running)) > capacity:
            running = running[1:]
        return frozenset().union(*running)

    return best(0, frozenset())


CASES = [(seed, in_flight, page_size) for seed in range(10) for in_flight in (0, 1) for page_size in (4, 2)]


@pytest.mark.parametrize(("seed", "in_flight", "page_size"), CASES)
def test_beladys_rule_is_optimal_for_a_prefix_cache(seed, in_flight, page_size, make_trace):
    tree = PageTree(with_tails(make_trace, random_paths(seed, depth=page_size // 2 + 1)), page_size)
    for capacity in range(2, tree.total_pages + 2, 4 // page_size):
        best = best_by_trying(tree, capacity, in_flight, prefixes=True)
        assert offline_optimum(tree, capacity, in_flight).hit_pages == best, capacity


@pytest.mark.parametrize(("seed", "in_flight", "page_size"), CASES)
def test_with_outputs_it_is_optimal_for_any_pages_and_a_bound_for_prefixes(seed, in_flight, page_size):
    tree = PageTree(with_outputs(seed, random_paths(seed, num_requests=6, depth=page_size // 2 + 1)), page_size)
    for capacity in range(2, tree.total_pages + 2, 3):
        bound = offline_optimum(tree, capacity, in_flight).hit_pages
        assert bound == best_by_trying(tree, capacity, in_flight, prefixes=False), capacity
        assert bound >= best_by_trying(tree, capacity, in_flight, prefixes=True), capacity


def test_the_page_with_the_furthest_next_use_is_evicted_first(make_trace):
    # When 3 arrives, 1 or 2 must be evicted. 2 is used sooner.
    tree = PageTree(with_tails(make_trace, [[1], [2], [3], [2], [1]]), BLOCK)
    assert offline_optimum(tree, 2) == Optimum(hit_pages=1, evicted_pages=2)
    assert offline_optimum(tree, 3) == Optimum(hit_pages=2, evicted_pages=0)


@pytest.mark.parametrize("in_flight", [0, 5])
@pytest.mark.parametrize("page_size", [4, 1])
def test_no_cache_has_more_hits_than_the_optimum(in_flight, page_size, make_trace, registry):
    trace = make_trace(*random_paths(3, num_requests=400, num_blocks=4, depth=5))
    evictions = [Choice(name) for name in registry.names("eviction")]
    study = Study(registry, [Choice("radix")], evictions, parse_capacities(["2%,5%,20%,100%"]), page_size, in_flight)
    found = study.run(trace)
    for at in found.capacities:
        for outcome in at.outcomes:
            assert outcome.replay.hit_tokens <= at.optimum.hit_pages * page_size, (at.asked, str(outcome.eviction))
    assert found.capacities[-1].optimum.evicted_pages == 0
    assert found.capacities[-1].outcomes[0].replay.hit_tokens == found.capacities[-1].optimum.hit_pages * page_size


def test_namespaces_share_nothing(make_trace):
    one = make_trace([1, 2], [1, 2])
    requests = tuple(
        TraceRequest(r.time_s, r.block_ids, r.prompt_tokens, r.num_tokens, namespace)
        for r, namespace in zip(one.requests, ["a", "b"], strict=True)
    )
    assert PageTree(one, BLOCK).total_pages == 2
    assert PageTree(Trace("two", BLOCK, requests), BLOCK).total_pages == 4
