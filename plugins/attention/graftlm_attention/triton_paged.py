"""Paged attention with the Triton kernels: chooses the launches of a step and their arguments."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers import CacheRows, cache_rows
from graftlm_attention.options import TritonOptions
from graftlm_attention.triton_decode import attend_decodes
from graftlm_attention.triton_extend import attend_chunks, map_tiles
from graftlm_attention.triton_kv_write import write_kv
from graftlm_attention.triton_shapes import TileShape, decode_shape, extend_shape, split_contexts

__all__ = ["Processors", "TritonPagedAttention"]

_LOG2_E = math.log2(math.e)
#: Assumed number of multiprocessors in Triton's interpreter, for context splits; large enough to test all paths.
_INTERPRETED_PROCESSORS = 16
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Processors:
    """The device's properties that determine the launches.

    Attributes:
        count: number of multiprocessors.
        capability: compute capability, (9, 0) for 9.0; None in the interpreter, which converts any dtype.
    """

    count: int
    capability: tuple[int, int] | None

    @classmethod
    def of(cls, device: torch.device) -> "Processors":
        """Read the properties of a device."""
        if device.type != "cuda":
            return cls(_INTERPRETED_PROCESSORS, None)
        properties = torch.cuda.get_device_properties(device)
        return cls(int(properties.multi_processor_count), torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class _Layer:
    """The data of one layer that launches need; they are the same in every step.

    Attributes:
        spec: the layer's specification.
        keys, values: [slots, H_kv, D].
        score_scale, cap_scale: see `attend_range`.
        decode: tile shape for one-token requests.
    """

    spec: AttentionLayer
    keys: CacheRows
    values: CacheRows
    score_scale: float
    cap_scale: float | None
    decode: TileShape

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.spec.num_heads // self.spec.num_kv_heads


@dataclass(frozen=True, slots=True)
class _Step:
    """The data of one batch.

    Attributes:
        batch: the batch.
        page_table: int32 [B, P]; its rows are contiguous.
        chunk_tiles: (query heads per key/value head, head_dim) -> shape of the query tiles into which chunks are
            divided, and the index of each tile's request. Empty if no request of the batch is a chunk.
    """

    batch: ForwardBatch
    page_table: Tensor
    chunk_tiles: dict[tuple[int, int], tuple[TileShape, Tensor]]


class TritonPagedAttention(AttentionBackend):
    """Attention that reads the pages in place.

    A layer makes one launch to write keys and values, one for all chunks, and two for all decodes.

    A batch of one-token requests may be captured in a CUDA graph. For such a batch, `prepare` makes no launch, and the
    launches of `forward` depend only on shapes. A replay reads the captured batch's `seq_lens`, `page_table` and
    `out_slots`. These tensors must keep their addresses, and the page table needs enough columns for the longest
    context.
    Padding rows of the batch have a context of 0 tokens, and their `out_slots` entry is a slot that is never read.

    Args:
        options: see `TritonOptions`.
        context: layers and cache. The cache's dtype is the layers' dtype, int8 or float8_e4m3fn.
        processors: properties of the device; None: reads the properties of `context.device`.

    Raises:
        ProviderUnavailableError: the device cannot read this cache.
    """

    def __init__(self, options: TritonOptions, context: AttentionContext, processors: Processors | None = None) -> None:
        processors = Processors.of(context.device) if processors is None else processors
        self._split_tokens = options.split_tokens
        self._page_size = context.page_size
        self._dtype = context.dtype
        self._num_processors = processors.count
        self._layers = [_describe(layer, context, processors) for layer in context.layers]
        self._step: _Step | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute the tiles of chunks; one-token requests need no preparation. Does not wait for the device."""
        table = batch.page_table if batch.page_table.stride(1) == 1 else batch.page_table.contiguous()
        tiles: dict[tuple[int, int], tuple[TileShape, Tensor]] = {}
        if batch.num_requests > batch.num_decodes:
            max_query_len = int(batch.query_lens_cpu[batch.num_decodes :].max())
            for group, head_dim in {(layer.group, layer.spec.head_dim) for layer in self._layers}:
                shape = extend_shape(group, head_dim, self._dtype, max_query_len)
                tiles[group, head_dim] = (shape, map_tiles(batch, shape.block_m // group))
        self._step = _Step(batch, table, tiles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write keys and values, then compute attention; the contract defines the shapes.

        Raises:
            InvariantError: called before `prepare`, or with tensors that do not fit the batch and the layer.
        """
        step = self._step
        if step is None:
            raise InvariantError("TritonPagedAttention.forward was called before prepare(batch)")
        num_tokens = step.batch.num_tokens
        _check(q, k, v, layer, num_tokens)
        plan = self._layers[layer.layer_id]
        sinks = None if layer.sinks is None else layer.sinks.float()
        write_kv(k, v, plan.keys, plan.values, step.batch.out_slots)
        out = torch.empty((num_tokens, layer.num_heads * layer.head_dim), dtype=q.dtype, device=q.device)
        if step.batch.num_decodes:
            self._attend_decodes(q, out, sinks, plan, step)
        if step.chunk_tiles:
            self._attend_chunks(q, out, sinks, plan, step)
        return out

    def _attend_decodes(self, q: Tensor, out: Tensor, sinks: Tensor | None, plan: _Layer, step: _Step) -> None:
        layer, num_decodes = plan.spec, step.batch.num_decodes
        max_len = step.page_table.shape[1] * self._page_size
        if layer.sliding_window is not None:
            max_len = min(max_len, layer.sliding_window)
        splits = split_contexts(num_decodes, layer.num_kv_heads, max_len, self._num_processors, self._split_tokens)
        attend_decodes(
            q,
            plan.keys,
            plan.values,
            out,
            num_decodes,
            step.batch.seq_lens,
            step.page_table,
            plan.decode,
            splits,
            page_size=self._page_size,
            window=layer.sliding_window,
            score_scale=plan.score_scale,
            cap_scale=plan.cap_scale,
            sinks=sinks,
        )

    def _attend_chunks(self, q: Tensor, out: Tensor, sinks: Tensor | None, plan: _Layer, step: _Step) -> None:
        shape, tile_requests = step.chunk_tiles[plan.group, plan.spec.head_dim]
        attend_chunks(
            q,
            plan.keys,
            plan.values,
            out,
            step.batch,
            step.page_table,
            tile_requests,
            shape,
            page_size=self._page_size,
            window=plan.spec.sliding_window,
            score_scale=plan.score_scale,
            cap_scale=plan.cap_scale,
            sinks=sinks,
        )


def _describe(layer: AttentionLayer, context: AttentionContext, processors: Processors) -> _Layer:
    keys, values = cache_rows(context.kv, layer.layer_id)
    obstacle = _cache_obstacle(keys.stored.dtype, context.dtype, processors.capability)
    if obstacle is not None:
        raise ProviderUnavailableError(f"attention/triton cannot read a cache of {keys.stored.dtype}: {obstacle}")
    return _Layer(
        layer,
        keys,
        values,
        score_scale=layer.scale / layer.soft_cap if layer.soft_cap is not None else layer.scale * _LOG2_E,
        cap_scale=layer.soft_cap * _LOG2_E if layer.soft_cap is not None else None,
        decode=decode_shape(layer.num_heads // layer.num_kv_heads, layer.head_dim, context.dtype),
    )


def _cache_obstacle(stored: torch.dtype, dtype: torch.dtype, capability: tuple[int, int] | None) -> str | None:
    if stored in (dtype, torch.int8):
        return None
    if stored != torch.float8_e4m3fn:
        return f"it reads {dtype} (the model's dtype), torch.int8 or torch.float8_e4m3fn"
    if capability is not None and capability < _FP8_CAPABILITY:
        return "conversion needs compute capability 8.9 or later; choose the model's dtype for the cache"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, num_tokens: int) -> None:
    """Check the tensors' shapes, because the kernels do not check their pointers.

    Raises:
        InvariantError: a shape is wrong.
    """
    shape = (num_tokens, layer.num_heads, layer.head_dim)
    kv_shape = (num_tokens, layer.num_kv_heads, layer.head_dim)
    if q.shape != shape or k.shape != kv_shape or v.shape != kv_shape:
        raise InvariantError(
            f"layer {layer.layer_id} expects q {shape} and k, v {kv_shape}, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
