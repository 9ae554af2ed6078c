"""An attention backend that waits until keys and values are loaded from host memory."""

from collections.abc import Callable

from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch

__all__ = ["AwaitingAttention"]


class AwaitingAttention(AttentionBackend):
    """A wrapper of an attention backend. Before each layer, it waits for the loads of this layer's keys and values.

    Args:
        inner: the wrapped backend.
        await_layer: function that is called with the layer_id before each call of `forward`.
    """

    def __init__(self, inner: AttentionBackend, await_layer: Callable[[int], None]) -> None:
        self._inner = inner
        self._await_layer = await_layer

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the backend."""
        self._inner.prepare(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Wait for the layer's loads, then write and attend; see `AttentionBackend.forward`."""
        self._await_layer(layer.layer_id)
        return self._inner.forward(q, k, v, layer)
