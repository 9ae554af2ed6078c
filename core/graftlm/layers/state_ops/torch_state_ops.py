"""The operations with a recurrent state in PyTorch, for all devices; the reference of other classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlm.contracts import StateBatch
from graftlm.layers.state_ops.torch_scans import delta_chunks, delta_steps, iter_chunks, ssd_chunks, ssd_steps

__all__ = ["TorchStateOps", "conv_chunks"]


class TorchStateOps:
    """`StateOps` in elementary operations: in chunks for prompts, in one step for decode."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        """Convolve each channel with its latest K inputs; see `StateOps`."""
        num_decodes = batch.segments.num_decodes
        out = x.new_empty(x.shape)
        if num_decodes:
            window = torch.cat((state.index_select(0, batch.sources[:num_decodes]), x[:num_decodes, None]), 1)
            out[:num_decodes] = _convolve(window, weight, bias, silu)[:, 0]
            state.index_copy_(0, batch.targets[:num_decodes], window[:, 1:])
        conv_chunks(x, weight, bias, state, batch, out, silu=silu)
        return out

    def ssd_scan(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch) -> Tensor:
        """Compute the scan of Mamba 2; see `StateOps`."""
        out = torch.empty_like(x)
        ssd_steps(x, log_decay, b, c, state, batch, out)
        ssd_chunks(x, log_decay, b, c, state, batch, out)
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """Compute the gated delta rule; see `StateOps`."""
        out = torch.empty_like(v)
        delta_steps(q, k, v, log_decay, beta, state, batch, out)
        delta_chunks(q, k, v, log_decay, beta, state, batch, out)
        return out


def conv_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, out: Tensor, *, silu: bool
) -> None:
    """Compute the segments of `StateOps.causal_conv` after the decode segments, and write them to `out`."""
    for start, num_tokens, source, target in iter_chunks(batch):
        window = torch.cat((state[source], x[start : start + num_tokens]))
        out[start : start + num_tokens] = _convolve(window[None], weight, bias, silu)[0]
        state[target] = window[num_tokens:]


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the outputs of consecutive inputs, float32 [B, L, C]; `window` is [B, L + K - 1, C]."""
    kernel_size = len(weight)
    num_outputs = window.shape[1] - kernel_size + 1
    weight, window = weight.float(), window.float()
    total = window[:, :num_outputs] * weight[0]
    for k in range(1, kernel_size):
        total.addcmul_(window[:, k : k + num_outputs], weight[k])
    if bias is not None:
        total.add_(bias)
    return F.silu(total, inplace=True) if silu else total
