"""An attention backend that waits for keys and values that are being loaded from host memory."""

from collections.abc import Callable

from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch

__all__ = ["AwaitingAttention"]


class AwaitingAttention(AttentionBackend):
    """Runs another backend; each layer waits only for its own loads.

    Args:
        inner: the backend.
        await_layer: function that is called with the layer_id before each layer's forward.
    """

    def __init__(self, inner: AttentionBackend, await_layer: Callable[[int], None]) -> None:
        self._inner = inner
        self._await_layer = await_layer

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the backend."""
        self._inner.prepare(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Wait, write and attend; see `AttentionBackend.forward`."""
        self._await_layer(layer.layer_id)
        return self._inner.forward(q, k, v, layer)
