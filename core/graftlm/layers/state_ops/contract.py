"""The interface of the operations with a recurrent state, which layers call."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from graftlm.contracts import StateBatch

__all__ = ["StateOps", "UsesStateOps"]


class StateOps(Protocol):
    """Convolution and scans over the segments of a step, on one device.

    Each method reads and writes the slots of `state` that the segments name, in the order of the segments. It changes
    no other argument.
    """

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        """Convolve each channel with its latest K inputs, with sums in float32.

        Args:
            x: [T, C], any row stride.
            weight: [K, C] of x's dtype, the latest input's weight last.
            bias: [C] of x's dtype; None: no bias.
            state: [slots, K - 1, C] of x's dtype, the inputs before a segment.
            silu: whether SiLU is applied to the sums.

        Returns: [T, C] of x's dtype.
        """
        ...

    def ssd_scan(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Compute the scan of Mamba 2: S = exp(g) S + x b^T, y = S c (arXiv:2405.21060).

        Args:
            x: float32 [T, H, P], inputs times step sizes.
            log_decay: float32 [T, H], g, at most 0.
            b, c: float32 [T, G, N], one for each of G groups of consecutive heads.
            state: float32 [slots, H, P, N].

        Returns: y, float32 [T, H, P].
        """
        ...

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """Compute the gated delta rule: S = exp(g) S; S = S + k (beta (v - S^T k))^T; y = S^T q (arXiv:2412.06464).

        Args:
            q, k: float32 [T, G, D_k], one for each of G groups of consecutive value heads.
            v: float32 [T, H, D_v].
            log_decay: float32 [T, H], g, at most 0.
            beta: float32 [T, H].
            state: float32 [slots, H, D_k, D_v].

        Returns: y, float32 [T, H, D_v].
        """
        ...


@runtime_checkable
class UsesStateOps(Protocol):
    """A module that calls `StateOps`; `bind_state_ops` finds it."""

    def use_state_ops(self, ops: StateOps) -> None:
        """Set the operations that every later call uses."""
        ...
