"""The attention layer, which passes a model's queries, keys and values to the backend."""

from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer
from graftlm.errors import InvariantError

__all__ = ["Attention"]


class Attention(nn.Module):
    """The attention of one layer; it has no parameters.

    Args:
        spec: shape of the layer for the backend and the KV cache.
    """

    def __init__(self, spec: AttentionLayer) -> None:
        super().__init__()
        self.spec = spec
        self._backend: AttentionBackend | None = None

    def bind(self, backend: AttentionBackend) -> None:
        """Set the backend that every `forward` calls."""
        self._backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache k [T, H_kv, D] and v [T, H_kv, D_v], then compute attention of q [T, H, D]; return [T, H * D_v].

        Raises:
            InvariantError: no backend was bound.
        """
        if self._backend is None:
            raise InvariantError("A model's forward was called before bind_attention(backend)")
        return self._backend.forward(q, k, v, self.spec)
