"""The interface of the operations between matrix products, which layers call."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from graftlm.layers.packing import PackedGates, PackedMatrix

__all__ = ["LayerOps", "UsesOps"]


class LayerOps(Protocol):
    """Norms, rotation and gated activation on one device, and the packing of weight matrices for it.

    Every implementation rounds at the same points as `TorchOps`. No method changes its arguments. Results share no
    memory with arguments, except in `add_rms_norm` without a residual: its second result is `x` itself.
    """

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, rounded to its dtype, and normalise the sum (arXiv:1910.07467).

        The mean square is float32. If the weight has x's dtype, the normalised sum is rounded before the product with
        the weight (Llama). If the weight is float32, only the product is rounded (Gemma).

        Args:
            x: [T, size].
            residual: [T, size] of x's dtype; None: x starts the stream.
            weight: [size], of x's dtype or float32.
            eps: number that is added to the mean square.

        Returns: (normalised [T, size], the new residual stream [T, size]), of x's dtype.
        """
        ...

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each head separately, rounded as in `add_rms_norm`.

        Args:
            heads: [T, H, D], any strides.
            weight: [H, D], of the heads' dtype or float32.
            eps: number that is added to the mean square.

        Returns: [T, H, D].
        """
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by their positions (arXiv:2104.09864), dimension i with dimension i + D / 2.

        Args:
            heads: [T, H, D], any strides.
            cos: [T, 1, D], of the heads' dtype.
            sin: [T, 1, D], of the heads' dtype; its first half is negated.

        Returns: [T, H, D], contiguous.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, hidden_act: str) -> Tensor:
        """Activate the gates, round them to the dtype, and multiply them with the other columns (arXiv:2002.05202).

        Args:
            gate_up: [T, 2 I], the gates first.
            hidden_act: name of the activation in config.json; see `graftlm.layers.activation`.

        Returns: [T, I].
        """
        ...

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """Return a weight matrix in the layout with the fastest products; None if this is the plain layout.

        Args:
            weight: [out, in]; no reference is kept.
        """
        ...

    def pack_gates(self, weight: Tensor, hidden_act: str) -> PackedGates | None:
        """Return gates and the rows that they multiply, packed so that products are activated before they are written.

        Args:
            weight: [2 I, in], the gates first; no reference is kept.
            hidden_act: name of the activation in config.json.

        Returns: None if this is not possible; the caller then calls `act_and_mul` after the product.
        """
        ...


@runtime_checkable
class UsesOps(Protocol):
    """A module that calls `LayerOps`; `bind_ops` finds it."""

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that every later call uses."""
        ...
