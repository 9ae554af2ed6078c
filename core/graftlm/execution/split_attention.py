"""Computes attention over two KV memories: one for full-attention layers and one for sliding-window layers."""

from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError

__all__ = ["SplitAttention"]


class SplitAttention(AttentionBackend):
    """Runs each layer with the backend for the layer's KV memory.

    The backends need no special support: each is prepared with a batch that has the page table of its memory. Entries
    of the window page table before the window are page 0; a backend does not attend to them.

    Args:
        full: backend for the full-attention layers; None if the model has none.
        window: another instance of the backend, for the sliding-window layers.
    """

    def __init__(self, full: AttentionBackend | None, window: AttentionBackend) -> None:
        self._full = full
        self._window = window

    @property
    def full(self) -> AttentionBackend | None:
        """The backend for the full-attention layers; None if there are none."""
        return self._full

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare both backends.

        Raises:
            InvariantError: the batch has no window page table.
        """
        if batch.window is None:
            raise InvariantError("split attention: the batch has no window page table; the plan was made without one")
        if self._full is not None:
            self._full.prepare(batch)
        self._window.prepare(batch.window)

    @property
    def repeats_calls(self) -> bool:
        """Whether both backends repeat their calls."""
        return self._window.repeats_calls and (self._full is None or self._full.repeats_calls)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write and attend in the layer's KV memory; see `AttentionBackend.forward`."""
        backend = self._full if layer.sliding_window is None else self._window
        if backend is None:
            raise InvariantError("split attention: no backend was made for layers without a window")
        return backend.forward(q, k, v, layer)
