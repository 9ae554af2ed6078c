"""Times the radix cache's bookkeeping, without any model: what it costs the thread that schedules.

    python benchmarks/cache_bookkeeping.py [--json FILE] [--leaves N] [--repeats N]

The tree holds N leaves of 256 tokens below a common system prompt of 1,024, and some prompts of 8,192 tokens. "Serve"
is what one request does: match, lock, insert all its pages, lock the new end, unlock both.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from graftlm.contracts import CacheContext, PrefixHandle, PrefixKey
from graftlm.types import TokenIds
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU

PROMPT_TOKENS = 8192
CHUNK_TOKENS = 512
VOCAB_SIZE = 128_000


@dataclass(frozen=True, slots=True)
class Cell:
    """What one operation cost, in microseconds."""

    operation: str
    page_size: int
    median_us: float
    p99_us: float


class Bench:
    """A tree, and operations on it."""

    def __init__(self, page_size: int, num_leaves: int, repeats: int) -> None:
        self.page_size = page_size
        self.repeats = repeats
        self.tokens = np.random.default_rng(0)
        self.picks = random.Random(0)
        self.cache = RadixCache(CacheContext(page_size, LRU(), time.monotonic))
        self.num_pages = 0
        system = self.draw(1024)
        self.leaves = [self.store(np.concatenate([system, self.draw(256)])) for _ in range(num_leaves)]
        self.prompts = [self.store(self.draw(PROMPT_TOKENS)) for _ in range(8)]

    def draw(self, num_tokens: int) -> TokenIds:
        """Return random tokens."""
        return self.tokens.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def store(self, tokens: TokenIds, chunk: int | None = None) -> PrefixKey:
        """Serve a prompt, in one piece or in chunks that each match and insert from where the last ended."""
        chunk = chunk or len(tokens)
        handle: PrefixHandle | None = None
        for end in range(chunk, len(tokens) + 1, chunk):
            handle = self.advance(PrefixKey(tokens[:end]), handle)
        if handle is not None:
            self.cache.unlock(handle)
        return PrefixKey(tokens)

    def advance(self, key: PrefixKey, held: PrefixHandle | None) -> PrefixHandle:
        """Match and insert a key from a held handle on; return the new one, held instead."""
        start = self.cache.match(key, held).handle
        self.cache.lock(start)
        num_new = len(key.token_ids) // self.page_size - start.num_pages
        pages = np.arange(self.num_pages, self.num_pages + num_new, dtype=np.int32)
        self.num_pages += num_new
        end = self.cache.insert(key, pages, start).handle
        self.cache.lock(end)
        self.cache.unlock(start)
        if held is not None:
            self.cache.unlock(held)
        return end

    def lock_and_unlock(self, handle: PrefixHandle) -> None:
        """Lock and unlock a handle."""
        self.cache.lock(handle)
        self.cache.unlock(handle)

    def touch_and_evict(self, key: PrefixKey) -> None:
        """Match one leaf, evict another."""
        self.cache.match(key)
        self.cache.evict(1)

    def cells(self) -> Iterator[Cell]:
        """Time each operation."""
        cache, leaves, prompts = self.cache, self.leaves, self.prompts
        handle = cache.match(leaves[0]).handle
        yield self.time(f"match {PROMPT_TOKENS} tokens in 1 node", lambda: prompts, cache.match)
        yield self.time(f"probe {PROMPT_TOKENS} tokens in 1 node", lambda: prompts, cache.probe)
        yield self.time("match 1280 tokens in 2 nodes", lambda: leaves, cache.match)
        yield self.time("probe 1280 tokens in 2 nodes", lambda: leaves, cache.probe)
        yield self.time("lock and unlock at depth 2", lambda: [handle], self.lock_and_unlock)
        yield self.time(f"serve {PROMPT_TOKENS} new tokens", self.new_prompts, self.store)
        yield self.time(
            f"serve {PROMPT_TOKENS} new tokens in chunks of {CHUNK_TOKENS}",
            self.new_prompts,
            lambda tokens: self.store(tokens, CHUNK_TOKENS),
        )
        started = time.perf_counter()
        cache.evict(1)
        yield Cell("first eviction", self.page_size, *[(time.perf_counter() - started) * 1e6] * 2)
        yield self.time("match one leaf, evict one", lambda: leaves[-100:], self.touch_and_evict)

    def new_prompts(self) -> list[TokenIds]:
        """Return one prompt that the tree has not seen."""
        return [self.draw(PROMPT_TOKENS)]

    def time(self, operation: str, choices: Callable[[], list[Any]], run: Callable[[Any], object]) -> Cell:
        """Time an operation on things picked at random."""
        durations = []
        for _ in range(self.repeats):
            argument = self.picks.choice(choices())
            started = time.perf_counter()
            run(argument)
            durations.append((time.perf_counter() - started) * 1e6)
        median, p99 = np.percentile(durations, [50, 99])
        return Cell(operation, self.page_size, float(median), float(p99))


def show(cells: list[Cell], num_leaves: int) -> None:
    """Print a table: one line an operation, one column pair a page size."""
    page_sizes = sorted({cell.page_size for cell in cells})
    table = Table(title=f"Radix cache, {num_leaves} leaves: median (99th percentile) in µs")
    table.add_column("operation")
    for page_size in page_sizes:
        table.add_column(f"page size {page_size}", justify="right")
    for operation in dict.fromkeys(cell.operation for cell in cells):
        row = [cell for cell in cells if cell.operation == operation]
        table.add_row(operation, *(f"{cell.median_us:,.1f} ({cell.p99_us:,.1f})" for cell in row))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--leaves", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=500)
    arguments = parser.parse_args()
    cells = [cell for page_size in (1, 16) for cell in Bench(page_size, arguments.leaves, arguments.repeats).cells()]
    show(cells, arguments.leaves)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
