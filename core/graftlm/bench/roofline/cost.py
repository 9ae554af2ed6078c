"""The cost of operators in bytes and operations, from the shapes of their tensors."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graftlm.contracts import AttentionLayer
from graftlm.execution.kv_store import KVStore
from graftlm.layers import GroupedLinear, Linear, RowGroups

__all__ = [
    "Cost",
    "activation_cost",
    "attention_cost",
    "elementwise_cost",
    "grouped_linear_cost",
    "linear_cost",
    "lm_head_cost",
    "rotation_cost",
    "sampler_cost",
]

#: Number of operations per element, by the usual count. Memory bandwidth limits all of these operators.
_NORM_FLOPS = 5
_ACTIVATION_FLOPS = 6
_ROTATION_FLOPS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """The minimum work of an operator, with each byte counted once.

    Attributes:
        weight_bytes: number of parameter bytes that are read.
        kv_bytes: number of KV cache bytes that are read or written.
        activation_bytes: number of input bytes that are read, and of output bytes that are written.
        flops: number of additions and multiplications.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0

    @property
    def num_bytes(self) -> int:
        """Sum of the three numbers of bytes."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.activation_bytes + other.activation_bytes,
            self.flops + other.flops,
        )


def linear_cost(layer: Linear, x: Tensor, out: Tensor) -> Cost:
    """Return the cost of a matrix product from x [..., in] to out [..., N].

    For a fused gate and up projection, N is half of the computed columns.
    """
    bias_bytes = 0 if layer.bias is None else layer.bias.nbytes
    return Cost(
        weight_bytes=_weight_bytes(layer) + bias_bytes,
        activation_bytes=_bytes(x, out),
        flops=2 * x.numel() * layer.out_features,
    )


def grouped_linear_cost(layer: GroupedLinear, groups: RowGroups, x: Tensor, out: Tensor) -> Cost:
    """Return the cost of the experts' products from x [N, in] to out [N, out]. Experts without rows are not counted."""
    num_used = sum(1 for _ in groups.on_host())
    return Cost(
        weight_bytes=_weight_bytes(layer) * num_used // layer.num_experts,
        activation_bytes=_bytes(x, out),
        flops=2 * x.numel() * out.shape[-1],
    )


def lm_head_cost(hidden: Tensor, logits: Tensor) -> Cost:
    """Return the cost of the output projection, tied or not, from hidden [S, hidden] to logits [S, V]."""
    weight_bytes = hidden.shape[-1] * logits.shape[-1] * hidden.dtype.itemsize
    flops = 2 * hidden.numel() * logits.shape[-1]
    return Cost(weight_bytes=weight_bytes, activation_bytes=_bytes(hidden, logits), flops=flops)


def elementwise_cost(layer: nn.Module, tensors: Iterable[Tensor]) -> Cost:
    """Return the cost of a norm or of a table of angles: each input is read once, each output written once.

    Args:
        tensors: inputs and outputs. A tensor that is both an input and an output is counted once.
    """
    different = list({tensor.data_ptr(): tensor for tensor in tensors}.values())
    flops = _NORM_FLOPS * max((tensor.numel() for tensor in different), default=0)
    return Cost(weight_bytes=_own_bytes(layer), activation_bytes=_bytes(*different), flops=flops)


def activation_cost(out: Tensor) -> Cost:
    """Return the cost of out = act(gate) * up, where all three tensors are [T, I]."""
    return Cost(activation_bytes=3 * out.nbytes, flops=_ACTIVATION_FLOPS * out.numel())


def rotation_cost(q: Tensor, k: Tensor) -> Cost:
    """Return the cost of rotating q [T, H, D] and k [T, H_kv, D]; both are read and written."""
    return Cost(activation_bytes=2 * (q.nbytes + k.nbytes), flops=_ROTATION_FLOPS * (q.numel() + k.numel()))


def attention_cost(
    spec: AttentionLayer,
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    kv_dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
) -> Cost:
    """Return the cost of one layer's attention: each cached token is read once, each new token is written once.

    Args:
        query_lens: int32 [B], number of new tokens of each request.
        seq_lens: int32 [B], number of tokens of each request, including the new ones.
        kv_dtype: dtype of the KV cache.
        q: queries [T, H, D].
        k: keys [T, H_kv, D]. Values have the same shape, or are the first columns of the keys.
    """
    window = int(seq_lens.max()) if spec.sliding_window is None else spec.sliding_window
    num_keys = [np.minimum(np.arange(n - q_len, n) + 1, window) for q_len, n in zip(query_lens, seq_lens, strict=True)]
    num_pairs = sum(int(counts.sum()) for counts in num_keys)  # number of pairs of a query and a key
    num_read = sum(int(min(n, window + q_len - 1)) for q_len, n in zip(query_lens, seq_lens, strict=True))
    token_bytes = KVStore.bytes_per_token([spec], kv_dtype)
    value_share = spec.value_dim / spec.head_dim
    return Cost(
        kv_bytes=(num_read + int(query_lens.sum())) * token_bytes,
        activation_bytes=int((1 + value_share) * (q.nbytes + k.nbytes)),
        flops=2 * spec.num_heads * (spec.head_dim + spec.value_dim) * num_pairs,
    )


def sampler_cost(logits: Tensor) -> Cost:
    """Return the cost of greedy sampling from logits [S, V]."""
    return Cost(activation_bytes=logits.nbytes, flops=logits.numel())


def _weight_bytes(layer: Linear | GroupedLinear) -> int:
    """Return the size of a layer's stored weight in bytes; it may be quantized, packed or plain."""
    return sum(kernel.num_bytes for kernel in layer.kernels) or layer.num_weights * layer.weight.dtype.itemsize


def _own_bytes(layer: nn.Module) -> int:
    return _bytes(*layer.parameters(recurse=False), *layer.buffers(recurse=False))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
