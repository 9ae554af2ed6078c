"""One step's batch as models and attention backends see it: ragged, built once, never filled in later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B requests. Each request brings 1..n consecutive tokens; one-token requests come first.

    Request b owns the tokens cu_seqlens_q[b] : cu_seqlens_q[b + 1]; its last token stands at position seq_lens[b] - 1.
    Its context token at position p lies in slot page_table[b, p // page_size] * page_size + p % page_size.
    A request may attend to slots that another request of this same batch writes: all keys and values of the batch are
    written, layer by layer, before any request attends.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T].
        out_slots: int64 [T], the slot that each token's key and value are written to.
        cu_seqlens_q: int32 [B + 1].
        seq_lens: int32 [B], context length with this step's tokens.
        page_table: int32 [B, P], page ids; entries past a request's pages are in range and mean nothing.
        logits_idx: int64 [S], the tokens whose logits are wanted, in order of the requests.
        wanted_idx: int64 [W], W >= 1, the tokens whose hidden states are wanted; None: all are. Of a model that does
            not say `selects_tokens` it is None.
        num_decodes: how many requests at the front bring exactly one token.
        query_lens_cpu, seq_lens_cpu: int32 [B], host copies.
        page_table_cpu: int32 [B, P], host copy.
        in_graph: whether a graph reads these tensors: then all batches of B requests lie in the same ones.
        window: this batch as a backend over the memory of the sliding-window layers must see it: with their page table
            and slots. None where all layers share one memory. Backends need not look at it.
    """

    input_ids: Tensor
    positions: Tensor
    out_slots: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    logits_idx: Tensor
    num_decodes: int
    query_lens_cpu: NDArray[np.int32]
    seq_lens_cpu: NDArray[np.int32]
    page_table_cpu: NDArray[np.int32]
    in_graph: bool = False
    window: ForwardBatch | None = None
    wanted_idx: Tensor | None = None

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[0])
