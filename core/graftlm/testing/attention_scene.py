"""Creates random requests with a paged cache, for tests that compare attention backends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.execution.kv_store import KVStore
from graftlm.layers.kv_codes import CacheRows, cache_rows
from graftlm.testing.batches import make_batch

__all__ = ["AttentionScene", "LayerInputs", "Outcome", "random_requests"]

_SPARE_PAGES = 5


class LayerInputs(NamedTuple):
    """The inputs of one layer's `forward`: q [T, H, D], k [T, H_kv, D] and v [T, H_kv, D_v]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a backend for a scene: each layer's output, [T, H * D_v], and the KV cache after the step."""

    outputs: list[Tensor]
    store: KVStore


def random_requests(seed: int) -> list[tuple[int, int]]:
    """Return (tokens in the cache, new tokens) of random requests, one-token requests first."""
    draw = random.Random(seed)
    decodes = [(draw.choice((0, 1, 15, 16, 17, draw.randint(2, 90))), 1) for _ in range(draw.randint(0, 6))]
    chunks = [(draw.choice((0, 0, 16, draw.randint(1, 60))), draw.randint(2, 40)) for _ in range(draw.randint(1, 3))]
    return decodes + chunks


@dataclass(frozen=True, slots=True)
class AttentionScene:
    """A batch, the inputs of its layers, and a KV cache with NaN in all slots that the batch does not read.

    int8 codes cannot be NaN, so in an int8 cache the scales are NaN.

    Attributes:
        context: context for backends; each run uses a copy of its cache.
        requests: (tokens in the cache, new tokens) of each request.
        page_tables: page ids of each request.
        store: KV cache before the step.
        batch: batch of the step.
        inputs: inputs of each layer.
    """

    context: AttentionContext
    requests: tuple[tuple[int, int], ...]
    page_tables: tuple[tuple[int, ...], ...]
    store: KVStore
    batch: ForwardBatch
    inputs: tuple[LayerInputs, ...]

    @classmethod
    def draw(
        cls,
        requests: Sequence[tuple[int, int]],
        layers: Sequence[AttentionLayer],
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        page_tables: Sequence[Sequence[int]] | None = None,
        forget_before_window: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> AttentionScene:
        """Create a scene with random numbers.

        Args:
            requests: (tokens in the cache, new tokens) of each request; one-token requests first.
            layers: the attention layers.
            page_size: number of tokens in a page.
            dtype: dtype of queries, keys and values.
            device: device of all tensors.
            seed: seed of the random numbers.
            page_tables: page ids of each request; pages may be shared. None: random pages.
            forget_before_window: whether cached tokens before every query's window are NaN.
            kv_dtype: name of the cache's dtype; None: `dtype`.
        """
        generator = torch.Generator().manual_seed(seed)
        tables = _scatter(requests, page_size, generator) if page_tables is None else page_tables
        num_pages = 1 + max(page for table in tables for page in table) + _SPARE_PAGES
        store = KVStore(layers, num_pages, page_size, dtype if kv_dtype is None else kv_dtype, device)
        batch = make_batch([([0] * new, past) for past, new in requests], tables, page_size, device=device)
        for layer in layers:
            window = layer.sliding_window if forget_before_window else None
            slots = torch.tensor(_cached_slots(requests, tables, page_size, window), dtype=torch.int64, device=device)
            _forget(store, layer.layer_id)
            for rows in _written_rows(store, layer):
                shape = (len(slots), layer.num_kv_heads, layer.head_dim)
                rows.write(slots, _normal(shape, generator, dtype, device))
        inputs = tuple(_draw_inputs(layer, batch.num_tokens, generator, dtype, device) for layer in layers)
        max_len = int(batch.seq_lens_cpu.max())
        context = AttentionContext(layers, store, page_size, device, dtype, len(requests), max_len)
        return cls(context, tuple(requests), tuple(tuple(table) for table in tables), store, batch, inputs)

    def run(self, create: Callable[[AttentionContext], AttentionBackend]) -> Outcome:
        """Run one step of a new backend on a copy of the cache."""
        store = self._copy_store()
        backend = create(replace(self.context, kv=store))
        return Outcome(self._step(backend), store)

    @staticmethod
    def run_all(
        create: Callable[[AttentionContext], AttentionBackend], scenes: Sequence[AttentionScene]
    ) -> list[Tensor]:
        """Run scenes as steps of one backend with one cache, initially NaN; return the first layer's outputs."""
        first = scenes[0].context
        num_pages = max(scene.store.num_pages for scene in scenes)
        store = KVStore(first.layers, num_pages, first.page_size, scenes[0].store.dtype, first.device)
        for layer in first.layers:
            _forget(store, layer.layer_id)
        max_requests = max(scene.context.max_requests for scene in scenes)
        max_len = max(scene.context.max_context_len for scene in scenes)
        backend = create(replace(first, kv=store, max_requests=max_requests, max_context_len=max_len))
        return [scene._step(backend)[0] for scene in scenes]

    def alone(self, b: int) -> AttentionScene:
        """Return a scene that has only request b."""
        past, new = self.requests[b]
        table = self.page_tables[b]
        first, end = self.batch.cu_seqlens_q[b : b + 2].tolist()
        batch = make_batch([([0] * new, past)], [table], self.context.page_size, device=self.context.device)
        inputs = tuple(LayerInputs(*(tensor[first:end] for tensor in layer)) for layer in self.inputs)
        return replace(self, requests=((past, new),), page_tables=(table,), batch=batch, inputs=inputs)

    def with_garbage(self, number: float) -> AttentionScene:
        """Return the scene with `number` in place of NaN in the cache."""
        store = self._copy_store()
        for layer in self.context.layers:
            for cache in store.stored(layer.layer_id):
                if cache.dtype != torch.float8_e4m3fn:  # float8 cannot represent every number
                    cache[cache.isnan()] = number
        return replace(self, store=store)

    def with_input(self, name: str, tokens: slice, number: float) -> AttentionScene:
        """Return the scene with `number` in place of some tokens' q, k or v; `name` selects one of them."""
        inputs = []
        for layer in self.inputs:
            changed = getattr(layer, name).clone()
            changed[tokens] = number
            inputs.append(layer._replace(**{name: changed}))
        return replace(self, inputs=tuple(inputs))

    def packed(self) -> AttentionScene:
        """Return the scene with each layer's q, k and v as views of one tensor."""
        inputs = []
        for layer in self.inputs:
            sizes = [tensor.shape[1] for tensor in layer]
            inputs.append(LayerInputs(*torch.split(torch.cat(layer, dim=1), sizes, dim=1)))
        return replace(self, inputs=tuple(inputs))

    def written(self, store: KVStore) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (content of `store`, content before the step, expected content) per cache tensor, all [slots, ...]."""
        ideal = self._copy_store()
        for layer, inputs in zip(self.context.layers, self.inputs, strict=True):
            for rows, new in zip(_written_rows(ideal, layer), (inputs.k, inputs.v), strict=False):
                rows.write(self.batch.out_slots, new)
            tensors = (each.stored(layer.layer_id) for each in (store, self.store, ideal))
            for after, before, expected in zip(*tensors, strict=True):
                yield _comparable(after), _comparable(before), _comparable(expected)

    def _step(self, backend: AttentionBackend) -> list[Tensor]:
        backend.prepare(self.batch)
        return [backend.forward(*inputs, layer) for layer, inputs in zip(self.context.layers, self.inputs, strict=True)]

    def _copy_store(self) -> KVStore:
        context = self.context
        copy = KVStore(context.layers, self.store.num_pages, context.page_size, self.store.dtype, context.device)
        for layer in context.layers:
            for ours, theirs in zip(copy.stored(layer.layer_id), self.store.stored(layer.layer_id), strict=True):
                ours.copy_(theirs)
        return copy


def _written_rows(store: KVStore, layer: AttentionLayer) -> tuple[CacheRows, ...]:
    """Return the caches that a backend writes for a layer: keys and values, or only keys."""
    keys, values = cache_rows(store, layer.layer_id)
    return (keys, values) if layer.value_prefix_dim is None else (keys,)


def _forget(store: KVStore, layer_id: int) -> None:
    """Fill a layer's cache with NaN, or with 99 for int8 codes."""
    for tensor in store.stored(layer_id):
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1).float() if tensor.dtype == torch.float8_e4m3fn else tensor.flatten(0, 1)


def _scatter(requests: Sequence[tuple[int, int]], page_size: int, generator: torch.Generator) -> list[list[int]]:
    """Return page ids for each request, random and without shared pages."""
    counts = [-(-(past + new) // page_size) for past, new in requests]
    pages = torch.randperm(sum(counts) + _SPARE_PAGES, generator=generator).tolist()
    return [[pages.pop() for _ in range(count)] for count in counts]


def _cached_slots(
    requests: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], page_size: int, window: int | None
) -> list[int]:
    """Return the slots of the cached tokens that at least one query attends to."""
    slots: set[int] = set()
    for (past, _), table in zip(requests, tables, strict=True):
        start = 0 if window is None else max(0, past - window + 1)
        slots.update(table[p // page_size] * page_size + p % page_size for p in range(start, past))
    return sorted(slots)


def _draw_inputs(
    layer: AttentionLayer, num_tokens: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> LayerInputs:
    query = (num_tokens, layer.num_heads, layer.head_dim)
    key = (num_tokens, layer.num_kv_heads, layer.head_dim)
    q, k = _normal(query, generator, dtype, device), _normal(key, generator, dtype, device)
    v = _normal(key, generator, dtype, device) if layer.value_prefix_dim is None else k[..., : layer.value_prefix_dim]
    return LayerInputs(q, k, v)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
