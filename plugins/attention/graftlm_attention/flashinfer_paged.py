"""Paged attention with FlashInfer's wrappers: planned once per step, run once per layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers import CacheRows
from graftlm_attention.flashinfer_library import FlashInferLibrary
from graftlm_attention.flashinfer_planner import CudaFence, Fence, LayerKind, LayerPlanner, NoFence, Part
from graftlm_attention.options import FlashInferOptions

__all__ = ["FlashInferAttention"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The data of one layer that `forward` needs; they are the same in every step.

    Attributes:
        kind: key of the layer's planner.
        keys, values: [pages, page_size, H_kv, D].
    """

    kind: LayerKind
    keys: Tensor
    values: Tensor


class FlashInferAttention(AttentionBackend):
    """Attention that FlashInfer plans on the host, once per step for each kind of layer.

    A batch of one-token requests may be captured in a CUDA graph. `prepare` creates the buffers for a batch size at the
    first batch of that size, and writes the plans of later batches of that size into the same buffers.

    Args:
        options: see `FlashInferOptions`.
        context: layers and cache; both must have the same dtype.
        library: FlashInfer's constructors.
        make_fence: creates the fence of each wrapper; None: `CudaFence` on a GPU, `NoFence` on a CPU.

    Raises:
        ProviderUnavailableError: the cache has another dtype, a layer has sinks, or a layer's values are a prefix of
            its keys.
    """

    def __init__(
        self,
        options: FlashInferOptions,
        context: AttentionContext,
        library: FlashInferLibrary,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        self._write_kv = library.write_kv
        self._layers = [_describe(layer, context) for layer in context.layers]
        # Zeros, because FlashInfer keeps semaphores in the workspace and expects them to start at 0.
        workspace = torch.zeros(options.workspace_mib << 20, dtype=torch.uint8, device=context.device)
        if make_fence is None:
            make_fence = CudaFence if context.device.type == "cuda" else NoFence
        self._planners = {
            kind: LayerPlanner(kind, library, workspace, context.page_size, context.dtype, options, make_fence)
            for kind in dict.fromkeys(layer.kind for layer in self._layers)
        }
        self._batch: ForwardBatch | None = None
        self._parts: dict[LayerKind, tuple[Part, ...]] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan the step. Waits for the device only if it has not yet copied the previous plan of the same wrapper."""
        self._parts = {kind: planner.plan(batch) for kind, planner in self._planners.items()}
        self._batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write keys and values, then compute attention; the contract defines the shapes.

        Raises:
            InvariantError: called before `prepare`, or with tensors that do not fit the batch and the layer.
        """
        batch = self._batch
        if batch is None:
            raise InvariantError("FlashInferAttention.forward was called before prepare(batch)")
        _check(q, k, v, layer, batch.num_tokens)
        plan = self._layers[layer.layer_id]
        keys, values = (CacheRows(stored.flatten(0, 1), None) for stored in (plan.keys, plan.values))
        self._write_kv(k, v, keys, values, batch.out_slots)
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts[plan.kind]:
            part.attend(q[part.tokens], (plan.keys, plan.values), out[part.tokens])
        return out.flatten(1)


def _describe(layer: AttentionLayer, context: AttentionContext) -> _Layer:
    if layer.sinks is not None or layer.value_prefix_dim is not None:
        raise ProviderUnavailableError(
            f"attention/flashinfer supports neither attention sinks nor latent attention, which layer {layer.layer_id} "
            "needs; set attention.name: auto"
        )
    keys, values = context.kv.keys(layer.layer_id), context.kv.values(layer.layer_id)
    if keys.dtype != context.dtype:
        raise ProviderUnavailableError(
            f"attention/flashinfer supports only a KV cache of the model's dtype, {context.dtype}, got "
            f"{keys.dtype}; set attention.name: triton"
        )
    return _Layer(LayerKind.of(layer), keys, values)


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
