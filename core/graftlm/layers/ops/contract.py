"""The operations between matrix products, as layers call them."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from graftlm.layers.packing import PackedGates, PackedMatrix

__all__ = ["LayerOps", "UsesOps"]


class LayerOps(Protocol):
    """Norms, rotation and gated activation on one device, and how it likes its weight matrices.

    Every implementation rounds where `TorchOps` does. None changes its arguments, and results share no memory with
    them, but for `add_rms_norm` without a residual, whose second result is `x` itself.
    """

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, rounded to its dtype, and normalise the sum (arXiv:1910.07467).

        The mean square is float32. A weight of x's dtype multiplies what has been rounded to that dtype, as Llama's
        does; a float32 weight multiplies before the only rounding, as Gemma's does.

        Args:
            x: [T, size].
            residual: [T, size] of x's dtype; None where x begins the stream.
            weight: [size], of x's dtype or float32.
            eps: added to the mean square.

        Returns: (normalised [T, size], the new residual stream [T, size]), of x's dtype.
        """
        ...

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each head by itself, rounded as `add_rms_norm` does.

        Args:
            heads: [T, H, D], any strides.
            weight: [H, D], of the heads' dtype or float32.
            eps: added to the mean square.

        Returns: [T, H, D].
        """
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads by their positions (arXiv:2104.09864), dimension i with dimension i + D / 2.

        Args:
            heads: [T, H, D], any strides.
            cos: [T, 1, D], of the heads' dtype.
            sin: [T, 1, D], likewise; its first half is negated.

        Returns: [T, H, D], contiguous.
        """
        ...

    def act_and_mul(self, gate_up: Tensor, hidden_act: str) -> Tensor:
        """Multiply the activated gates, rounded to the dtype, with what they gate (arXiv:2002.05202).

        Args:
            gate_up: [T, 2 I], the gates first.
            hidden_act: name of the activation in config.json, one that `graftlm.layers.activation` knows.

        Returns: [T, I].
        """
        ...

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """Return a weight matrix in the layout whose products are fastest, None where that is the plain one.

        Args:
            weight: [out, in]; not kept.
        """
        ...

    def pack_gates(self, weight: Tensor, hidden_act: str) -> PackedGates | None:
        """Return a matrix of gates and what they gate, packed to be activated while it is multiplied.

        Args:
            weight: [2 I, in], the gates first; not kept.
            hidden_act: name of the activation in config.json.

        Returns: None where a product and `act_and_mul` after it are all there is.
        """
        ...


@runtime_checkable
class UsesOps(Protocol):
    """A module that calls `LayerOps`; `bind_ops` finds it."""

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that every later call uses."""
        ...
