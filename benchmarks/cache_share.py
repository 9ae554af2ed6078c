"""Measures the share of a run that the prefix cache's bookkeeping takes when no prompt can reuse cached tokens.

    python benchmarks/cache_share.py [--requests N] [--json FILE]

A random model of 100M parameters serves requests without a common prefix. All are sent at the start, with overlap on. A
plugin provides a cache that wraps the radix cache and times every call. The paper that introduced RadixAttention
(arXiv:2312.07104, section 6.3) reports 0.2 s of 74.3 s (0.27 %) for 100 such requests on a GPU.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import graftlm
from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import (
    CacheCapabilities,
    CacheContext,
    InsertResult,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
)
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.types import PageIds
from graftlm_cache.radix import RadixCache


class TimedCache(PrefixCache):
    """A radix cache that times the calls of its methods.

    Attributes:
        seconds: method -> total time of its calls.
        calls: method -> number of its calls.
    """

    def __init__(self, context: CacheContext) -> None:
        self.inner = RadixCache(context)
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def _timed(self, name: str, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = getattr(self.inner, name)(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.calls[name] = self.calls.get(name, 0) + 1
        return result

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        match: PrefixMatch = self._timed("match", key, resume)
        return match

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        result: InsertResult = self._timed("insert", key, pages, handle)
        return result

    def lock(self, handle: PrefixHandle) -> None:
        self._timed("lock", handle)

    def unlock(self, handle: PrefixHandle) -> None:
        self._timed("unlock", handle)

    def evict(self, num_pages: int) -> PageIds:
        pages: PageIds = self._timed("evict", num_pages)
        return pages

    def reset(self) -> PageIds:
        return self.inner.reset()

    @property
    def evictable_pages(self) -> int:
        return self.inner.evictable_pages

    @property
    def locked_pages(self) -> int:
        return self.inner.locked_pages

    def walk(self) -> Iterator[NodeView]:
        return self.inner.walk()

    @property
    def version(self) -> int:
        return self.inner.version

    def probe(self, key: PrefixKey) -> int:
        num_pages: int = self._timed("probe", key)
        return num_pages

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        again: ProbePlace | None = self._timed("probe_again", key, place)
        return again


class TimedCachePlugin:
    """A plugin that provides the cache `timed`, and stores the created caches."""

    def __init__(self) -> None:
        self.caches: list[TimedCache] = []

    def create(self, options: object, context: CacheContext) -> TimedCache:
        self.caches.append(TimedCache(context))
        return self.caches[-1]

    @hookimpl
    def provide_prefix_caches(self) -> list[Provider[TimedCache]]:
        return [
            Provider(
                name="timed",
                summary="radix with a stopwatch",
                api_version=1,
                create=self.create,
                capabilities=CacheCapabilities(),
            )
        ]


def measure(directory: Path, num_requests: int, page_size: int) -> dict[str, Any]:
    """Serve the requests; return the times in seconds, and the bookkeeping's shares of the run."""
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 30_000, random.integers(32, 257)).tolist() for _ in range(num_requests)]
    params = [
        SamplingParams(max_tokens=int(n), temperature=0.0, ignore_eos=True)
        for n in random.integers(8, 65, num_requests)
    ]
    plugin = TimedCachePlugin()
    # The memory has room for a third of the tokens that the requests write, so that eviction is timed too.
    fields = {"cache": {"name": "timed", "page_size": page_size}, "memory": {"kv_tokens": 12_288}}
    with Engine(model=str(directory), plugins=[plugin], **fields) as engine:
        engine.generate(prompts[0], params[0])
        cache = plugin.caches[-1]
        cache.seconds.clear()
        cache.calls.clear()
        before, started = engine.stats(), time.perf_counter()
        engine.generate(prompts, params, progress=False)
        wall_s, stats = time.perf_counter() - started, engine.stats()
    cache_s = sum(cache.seconds.values())
    return {
        "page_size": page_size,
        "requests": num_requests,
        "wall_s": wall_s,
        "cache_s": cache_s,
        "cache_share": cache_s / wall_s,
        "host_s": stats.host_s - before.host_s,
        "host_share": (stats.host_s - before.host_s) / wall_s,
        "evicted_tokens": stats.evicted_tokens - before.evicted_tokens,
        "cached_tokens": stats.cached_tokens - before.cached_tokens,
        "us_per_call": {name: cache.seconds[name] / n * 1e6 for name, n in cache.calls.items()},
        "calls": cache.calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path, help="save the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(
            Path(folder),
            hidden_size=768,
            intermediate_size=2048,
            num_layers=12,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            vocab_size=32_000,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.02,
            tokenizer=True,
        )
        results = [measure(model, arguments.requests, page_size) for page_size in (1, 64)]
    for r in results:
        print(
            f"page size {r['page_size']}: {r['wall_s']:.1f} s for {r['requests']} unshared requests, prefix cache "
            f"{r['cache_s'] * 1e3:.1f} ms = {r['cache_share']:.4%}, all planning and committing {r['host_share']:.2%}; "
            f"{r['evicted_tokens']:,} tokens evicted"
        )
        print("  µs per call:", {name: round(us, 2) for name, us in r["us_per_call"].items()}, "calls:", r["calls"])
    if arguments.json:
        meta = {"graftlm": graftlm.__version__, "cpus": os.cpu_count(), "results": results}
        arguments.json.write_text(json.dumps(meta, indent=2) + "\n")


if __name__ == "__main__":
    main()
