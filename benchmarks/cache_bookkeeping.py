"""Times the radix cache's bookkeeping, without a model. This time is spent in the scheduler's thread.

    python benchmarks/cache_bookkeeping.py [--json FILE] [--nodes N] [--repeats N]

Two trees are measured, at page sizes 1 and 64:

- "groups": 2,000 sequences of 2,048 tokens, in groups of 20 that share their first 512 tokens. They are inserted into
  one tree, which is empty at first, and then matched in random order. By then, most of the data to compare is no longer
  in the CPU caches.
- "large": N nodes (default: 50,000). Keys have 4,096 tokens; groups of 16 keys share their first 3,072.

The eviction of one leaf is timed in trees of 1,000 and of 50,000 leaves. Before each eviction another leaf is matched,
so that the eviction order changes.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.types import TokenIds
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU

VOCAB_SIZE = 128_000


@dataclass(frozen=True, slots=True)
class Cell:
    """The time of one operation, in microseconds."""

    tree: str
    page_size: int
    operation: str
    median_us: float
    mean_us: float
    p99_us: float


class Tree:
    """A radix cache, the handle of its root, and the number of allocated pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(CacheContext(page_size, LRU(), time.monotonic))
        self.root = self.cache.match(PrefixKey(np.empty(0, dtype=np.int32))).handle
        self.num_pages = 0

    def offer(self, tokens: TokenIds) -> tuple[PrefixKey, TokenIds]:
        """Return a key, and the numbers of new pages for all its tokens."""
        num_pages = len(tokens) // self.page_size
        self.num_pages += num_pages
        return PrefixKey(tokens), np.arange(self.num_pages - num_pages, self.num_pages, dtype=np.int32)


def grouped(num_groups: int, group_size: int, shared: int, total: int, seed: int) -> list[TokenIds]:
    """Return prompts of random tokens, in groups with a common prefix, in random order."""
    tokens = np.random.default_rng(seed)

    def draw(num_tokens: int) -> TokenIds:
        return tokens.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)

    prompts = []
    for _ in range(num_groups):
        prefix = draw(shared)
        prompts += [np.concatenate((prefix, draw(total - shared))) for _ in range(group_size)]
    random.Random(seed).shuffle(prompts)
    return prompts


def durations_us(run: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> list[float]:
    """Return the time of each call, in microseconds."""
    durations = []
    for argument in arguments:
        started = time.perf_counter_ns()
        run(*argument)
        durations.append((time.perf_counter_ns() - started) / 1000)
    return durations


def cell(tree: str, page_size: int, operation: str, durations: list[float]) -> Cell:
    """Return the median, the mean and the 99th percentile of an operation's durations."""
    p99 = float(np.percentile(durations, 99))
    return Cell(tree, page_size, operation, statistics.median(durations), statistics.fmean(durations), p99)


def operations(name: str, tree: Tree, keys: list[PrefixKey], num_tokens: int) -> Iterator[Cell]:
    """Time the operations that do not change the content of a tree."""
    cache, page_size = tree.cache, tree.page_size
    yield cell(name, page_size, f"match {num_tokens} tokens", durations_us(cache.match, [(key,) for key in keys]))
    handles = [cache.match(key).handle for key in keys]
    yield cell(name, page_size, "lock", durations_us(cache.lock, [(handle,) for handle in handles]))
    yield cell(name, page_size, "unlock", durations_us(cache.unlock, [(handle,) for handle in handles]))
    yield cell(name, page_size, f"probe {num_tokens} tokens", durations_us(cache.probe, [(key,) for key in keys]))
    places = [(key, cache.probe_again(key, None)) for key in keys]
    yield cell(name, page_size, "probe again, nothing changed", durations_us(cache.probe_again, places))
    hot = durations_us(cache.match, [(keys[0],)] * len(keys))
    yield cell(name, page_size, f"match {num_tokens} tokens, the same again", hot)


def groups_cells(page_size: int) -> Iterator[Cell]:
    """Time the tree "groups"; other engines have published figures for this shape."""
    tree = Tree(page_size)
    offers = [(*tree.offer(tokens), tree.root) for tokens in grouped(100, 20, 512, 2048, seed=0)]
    yield cell("groups", page_size, "insert 2048 tokens", durations_us(tree.cache.insert, offers))
    yield from operations("groups", tree, [offer[0] for offer in offers], 2048)
    yield cell("groups", page_size, "evict one leaf", durations_us(tree.cache.evict, [(1,)] * 1500))


def large_cells(page_size: int, num_nodes: int, repeats: int) -> Iterator[Cell]:
    """Time the same operations in the tree "large"; only `repeats` of its keys are stored, to save memory."""
    tree = Tree(page_size)
    kept: list[PrefixKey] = []
    inserts: list[float] = []
    for seed in range(num_nodes // 17):
        offers = [(*tree.offer(tokens), tree.root) for tokens in grouped(1, 16, 3072, 4096, seed)]
        inserts += durations_us(tree.cache.insert, offers)
        if len(kept) < repeats:
            kept.append(offers[-1][0])
    yield cell("large", page_size, "insert 4096 tokens", inserts[-repeats:])
    yield from operations("large", tree, kept, 4096)
    one = durations_us(tree.cache.evict, [(1,)] * repeats)
    yield cell("large", page_size, "evict one leaf", one)
    leaf_pages = 1024 // page_size
    many = durations_us(tree.cache.evict, [(1000 * leaf_pages,)] * 5)
    yield cell("large", page_size, "evict 1,000 leaves", many)


def eviction_cells(num_leaves: int, repeats: int) -> Iterator[Cell]:
    """Time evictions in a small and in a large tree of one-page leaves: the fastest of five alternating rounds."""
    counts = (1000, num_leaves)
    rounds = [[evictions_us(count, repeats) for count in counts] for _ in range(5)]
    for i, count in enumerate(counts):
        yield cell(f"{count:,} leaves", 1, "evict one leaf", min((r[i] for r in rounds), key=statistics.median))


def evictions_us(num_leaves: int, repeats: int) -> list[float]:
    """Return the times of single evictions in microseconds, each after a match of a recently inserted leaf."""
    tree = Tree(1)
    keys = []
    for leaf in range(num_leaves + repeats):
        key, pages = tree.offer(np.array([leaf, 0], dtype=np.int32))
        tree.cache.insert(key, pages, tree.root)
        keys.append(key)
    tree.cache.evict(1)
    durations = []
    for key in random.Random(0).choices(keys[-100:], k=repeats):
        tree.cache.match(key)
        durations += durations_us(tree.cache.evict, [(1,)])
    return durations


def show(cells: list[Cell]) -> None:
    """Print a table with one row per operation."""
    table = Table("tree", "page size", "operation", "median µs", "mean µs", "99 % µs", box=None)
    for c in cells:
        figures = (f"{figure:,.2f}" for figure in (c.median_us, c.mean_us, c.p99_us))
        table.add_row(c.tree, str(c.page_size), c.operation, *figures)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=500)
    arguments = parser.parse_args()
    cells: list[Cell] = []
    for page_size in (1, 64):
        cells += groups_cells(page_size)
        cells += large_cells(page_size, arguments.nodes, arguments.repeats)
    evictions = list(eviction_cells(arguments.nodes, arguments.repeats))
    show(cells + evictions)
    few, many = evictions
    print(f"evicting one of {arguments.nodes:,} leaves costs {many.median_us / few.median_us:.2f}x one of 1,000")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in cells + evictions], indent=2) + "\n")


if __name__ == "__main__":
    main()
