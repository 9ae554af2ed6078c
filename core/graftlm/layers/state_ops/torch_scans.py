"""Recurrences with a matrix as the state of each head, in PyTorch: in chunks for prompts, in one step for decode.

    Mamba 2's scan          S = exp(g) S + x b^T                              y = S c
    gated delta rule        S = exp(g) S;  S = S + k (beta (v - S^T k))^T     y = S^T q

All numbers are float32. g is at most 0, so a state is never amplified.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from graftlm.contracts import StateBatch

__all__ = ["delta_chunks", "delta_steps", "iter_chunks", "ssd_chunks", "ssd_steps"]

#: Number of tokens that are computed together; the cost of the products within a chunk grows with its square.
_CHUNK: Final = 64


def ssd_steps(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the decode segments of `StateOps.ssd_scan`, and write them to `out`."""
    num_decodes, group = batch.segments.num_decodes, x.shape[1] // b.shape[1]
    if num_decodes:
        states = state.index_select(0, batch.sources[:num_decodes]) * log_decay[:num_decodes, :, None, None].exp()
        b_heads = b[:num_decodes].repeat_interleave(group, 1)
        c_heads = c[:num_decodes].repeat_interleave(group, 1)
        states.addcmul_(x[:num_decodes, :, :, None], b_heads[:, :, None])
        out[:num_decodes] = torch.matmul(states, c_heads[..., None])[..., 0]
        state.index_copy_(0, batch.targets[:num_decodes], states)


def ssd_chunks(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the other segments of `StateOps.ssd_scan`, and write them to `out`."""
    for start, num_tokens, source, target in iter_chunks(batch):
        current = state[source]
        for first in range(start, start + num_tokens, _CHUNK):
            part = slice(first, min(first + _CHUNK, start + num_tokens))
            out[part], current = _ssd_chunk(x[part], log_decay[part], b[part], c[part], current)
        state[target] = current


def _ssd_chunk(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of consecutive tokens, [L, H, P], and the state after them, [H, P, N]."""
    group = x.shape[1] // b.shape[1]
    total = log_decay.T.cumsum(-1)  # [H, L]
    x, b, c = x.transpose(0, 1), b.transpose(0, 1), c.transpose(0, 1)  # [H, L, P], [G, L, N], [G, L, N]
    scores = (c @ b.transpose(1, 2)).repeat_interleave(group, 0) * _decays(total)
    b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
    out = scores @ x + (c @ state.transpose(1, 2)) * total[..., None].exp()
    left = (total[:, -1:] - total).exp()  # decay from each token to the end
    state = state * total[:, -1, None, None].exp() + (x * left[..., None]).transpose(1, 2) @ b
    return out.transpose(0, 1), state


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the decode segments of `StateOps.gated_delta_rule`, and write them to `out`."""
    num_decodes, group = batch.segments.num_decodes, v.shape[1] // k.shape[1]
    if num_decodes:
        q_heads = q[:num_decodes].repeat_interleave(group, 1)
        k_heads = k[:num_decodes].repeat_interleave(group, 1)
        states = state.index_select(0, batch.sources[:num_decodes]) * log_decay[:num_decodes, :, None, None].exp()
        known = torch.matmul(k_heads[:, :, None], states)[:, :, 0]  # [B, H, D_v]
        states.addcmul_(k_heads[..., None], ((v[:num_decodes] - known) * beta[:num_decodes, :, None])[:, :, None])
        out[:num_decodes] = torch.matmul(q_heads[:, :, None], states)[:, :, 0]
        state.index_copy_(0, batch.targets[:num_decodes], states)


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the other segments of `StateOps.gated_delta_rule`, and write them to `out`."""
    group = v.shape[1] // k.shape[1]
    for start, num_tokens, source, target in iter_chunks(batch):
        current = state[source]
        for first in range(start, start + num_tokens, _CHUNK):
            part = slice(first, min(first + _CHUNK, start + num_tokens))
            q_heads = q[part].transpose(0, 1).repeat_interleave(group, 0)
            k_heads = k[part].transpose(0, 1).repeat_interleave(group, 0)
            y, current = _delta_chunk(q_heads, k_heads, v[part].transpose(0, 1), log_decay[part], beta[part], current)
            out[part] = y.transpose(0, 1)
        state[target] = current


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of consecutive tokens, [H, L, D_v], and the state after them, [H, D_k, D_v].

    The value that token i adds depends on those that the tokens before it add. This is a triangular system of L
    equations per head; see section 3 of the paper.

    Args:
        q, k: [H, L, D_k].
        v: [H, L, D_v].
        log_decay, beta: [L, H].
    """
    total = log_decay.T.cumsum(-1)  # [H, L]
    decays, since_start = _decays(total), total[..., None].exp()
    k_beta = k * beta.T[..., None]
    overlap = ((k_beta @ k.transpose(1, 2)) * decays).tril(-1)  # the unit diagonal is implied
    right = v * beta.T[..., None] - (k_beta * since_start) @ state
    added = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    out = (q * since_start) @ state + ((q @ k.transpose(1, 2)) * decays) @ added
    left = (total[:, -1:] - total).exp()
    state = state * total[:, -1, None, None].exp() + (k * left[..., None]).transpose(1, 2) @ added
    return out, state


def _decays(total: Tensor) -> Tensor:
    """Return the decay from token j to token i, [H, L, L]; 0 for j > i. `total` is the sum of g up to each token."""
    return (total[:, :, None] - total[:, None]).tril_().exp_().tril_()


def iter_chunks(batch: StateBatch) -> Iterator[tuple[int, int, int, int]]:
    """Yield start, number of tokens, source and target of each segment after the decode segments, in order."""
    segments = batch.segments
    columns = (segments.starts, segments.lens, segments.sources, segments.targets)
    yield from zip(*(column[segments.num_decodes :].tolist() for column in columns), strict=True)
