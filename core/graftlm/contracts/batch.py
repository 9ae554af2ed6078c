"""The ragged batch of one step, which models and attention backends read. It is not changed after its creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts.state import StateBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B requests. Each request has one or more consecutive tokens; one-token requests come first.

    Request b has the tokens cu_seqlens_q[b] : cu_seqlens_q[b + 1]; its last token is at position seq_lens[b] - 1. Its
    token at position p is in slot page_table[b, p // page_size] * page_size + p % page_size. A request may attend to
    slots that another request of the same batch writes. In each layer, therefore, all keys and values of the batch are
    written before attention begins.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T]; or int64 [3, T], time, height and width, if the media processor of the model returns such
            positions and the step has prefill.
        out_slots: int64 [T], the slot that each token's key and value are written to.
        cu_seqlens_q: int32 [B + 1].
        seq_lens: int32 [B], context length in tokens, including this step's tokens.
        page_table: int32 [B, P], page ids. Entries past a request's pages are valid page ids without meaning.
        logits_idx: int64 [S], indices into T of the tokens whose logits are computed, in order of the requests.
        wanted_idx: int64 [W], W >= 1, indices into T of the tokens whose hidden states `forward` returns; None: all
            tokens. It is None if the model's `selects_tokens` is False.
        num_decodes: number of requests with exactly one token; they are the first in the batch.
        query_lens_cpu, seq_lens_cpu: int32 [B], number of tokens per request and `seq_lens`, on the host.
        page_table_cpu: int32 [B, P], `page_table` on the host.
        in_graph: whether a CUDA graph reads these tensors; all batches of B requests then use the same tensors.
        window: this batch with the page table and slots of the sliding-window layers, for the attention backend that
            uses these layers' KV memory. None if all layers share one memory. A backend need not read it.
        state: segments of the layers with a recurrent state; None if the model has no such layers.
        features: [F, width], rows of pictures' features that replace the embeddings of the tokens `feature_idx`, whose
            input ids are 0. None if the step has none, or the model's `takes_features` is False.
        feature_idx: int64 [F], indices into T; None without features.
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
    state: StateBatch | None = None
    features: Tensor | None = None
    feature_idx: Tensor | None = None

    @property
    def num_requests(self) -> int:
        """B, the number of requests."""
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.input_ids.shape[0])
