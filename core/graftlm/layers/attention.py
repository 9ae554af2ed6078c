"""The attention call site: passes a model's queries, keys and values to the backend."""

from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer
from graftlm.errors import InvariantError

__all__ = ["Attention"]


class Attention(nn.Module):
    """One layer's attention; holds no parameters.

    Args:
        spec: the layer's shape, as the backend and the KV cache see it.
    """

    def __init__(self, spec: AttentionLayer) -> None:
        super().__init__()
        self.spec = spec
        self._backend: AttentionBackend | None = None

    def bind(self, backend: AttentionBackend) -> None:
        """Set the backend that every `forward` calls."""
        self._backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [T, H, D] after writing k [T, H_kv, D] and v [T, H_kv, D_v]; returns [T, H * D_v].

        Raises:
            InvariantError: no backend was bound.
        """
        if self._backend is None:
            raise InvariantError("A model's forward was called before bind_attention(backend)")
        return self._backend.forward(q, k, v, self.spec)
