"""Runs a draft head: writes its keys and values in each step, and drafts from the hidden states of the latest steps."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, DraftHead, DraftHeadBatch
from graftlm.execution.batch import to_device
from graftlm.execution.draft_samples import DraftSamples
from graftlm.execution.generation import PickedTokens, decode_batch, generate, most_probable
from graftlm.execution.kv_store import KVStore
from graftlm.execution.recorded_function import RecordedFunction
from graftlm.layers import cache_rows
from graftlm.plan import StepPlan

__all__ = ["HeadSteps"]

#: Position of the feature of a row that has none. The token after it would be at a negative position.
_NO_POSITION: Final = -2


class HeadSteps:
    """A draft head, with the feature of each row's last computed token. All tensors stay on the device.

    A step computes hidden states h of its tokens, and samples. Then each token's key and value are written, which
    depend on its hidden state and on the next token:

        tokens of the step       t4   t5   t6          of a prompt chunk, before t7
        next tokens              t5   t6   t7          t7 is known from the plan, or sampled in this step
        written at position       4    5    6
        feature of the row                 h6          with it, `draft` starts at position 6

    The keys and values of drafted tokens that were rejected are overwritten later, as in all layers.

    Args:
        head: the head with its weights.
        attention: backend of the memory that contains the head's layer; it need not be bound to the head yet.
        kv: the KV memory.
        num_rows: R, number of rows of the request table.
        dtype: dtype of the served model.
        records: whether the head's computations on a CPU are recorded if the attention backend supports it.
    """

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        kv: KVStore,
        num_rows: int,
        dtype: torch.dtype,
        *,
        records: bool = True,
    ) -> None:
        self._head = head
        self._attention = attention
        self._page_size = kv.page_size
        self._device = kv.device
        self._layer = head.attention_layer
        self._kv = kv
        self._features = torch.zeros(num_rows, head.feature_size, dtype=dtype, device=kv.device)
        self._positions = torch.full((num_rows,), _NO_POSITION, dtype=torch.int64, device=kv.device)
        head.bind_attention(attention)
        is_recorded = records and attention.repeats_calls and kv.device.type == "cpu"
        self._write = RecordedFunction("writing keys of the draft head", self._write_keys, is_recorded=is_recorded)
        self._advance = RecordedFunction(
            "a step of the draft head", lambda *inputs: (head.forward(*inputs),), is_recorded=is_recorded
        )
        self._choose = RecordedFunction(
            "the choice of the draft head's tokens", self._most_probable, is_recorded=is_recorded
        )

    def observe(
        self,
        plan: StepPlan,
        hidden: Tensor,
        sampled: Tensor | None,
        drafts: DraftSamples | None,
        counted: Tensor | None,
    ) -> None:
        """Write the keys and values of a step's tokens, and store the features of its rows.

        Args:
            hidden: hidden states of all tokens, [T, H (1 + n)]; see `DraftHead.features`.
            sampled: int64 [S], the sampled tokens; None if no request samples.
            drafts, counted: the step's drafts, and which samples count, bool [S]; None if the step has no drafts.
        """
        device = self._device
        positions = to_device(plan.positions, device)
        slots = to_device(plan.out_slots, device)
        (features,) = self._write(hidden, self._next_ids(plan, sampled), positions, slots)
        rows, last = self._last_tokens(plan, drafts, counted)
        self._features.index_copy_(0, rows, features.index_select(0, last))
        self._positions.index_copy_(0, rows, positions.index_select(0, last))

    def start_rows(self, plan: StepPlan) -> None:
        """Delete the features of rows that get a new request in a step. Called before the step's `observe`."""
        if plan.setups:
            rows = np.array([setup.row for setup in plan.setups], dtype=np.int64)
            self._positions.index_fill_(0, to_device(rows, self._device), _NO_POSITION)

    def draft(self, batch: DraftHeadBatch, page_table: NDArray[np.int32]) -> PickedTokens:
        """Launch the drafting for a batch.

        Args:
            page_table: int32 [B, P], pages of the batch's requests, with slots for all tokens and drafts.

        Returns: the drafts; the probabilities of a request are 0 if its row has no feature of its last computed token.
        """
        device, page_size = self._device, self._page_size
        rows = to_device(batch.rows.astype(np.int64), device)
        starts = batch.lens - 2  # the position whose output predicts the token after the latest one
        is_known = (self._positions.index_select(0, rows) == to_device(starts, device)).float()

        def step(state: Tensor, token_ids: Tensor, idx: NDArray[np.intp], num_before: int) -> Tensor:
            positions = starts[idx] + num_before
            forward = decode_batch(token_ids, positions, page_table[idx], page_size, device)
            self._attention.prepare(forward)
            return self._advance(state, token_ids, forward.positions)[0]

        def advance(state: Tensor, token_ids: Tensor, idx: NDArray[np.intp], num_before: int) -> Tensor:
            return step(state, token_ids, idx, num_before + 1)

        every = np.arange(len(batch.rows))
        latest = to_device(batch.token_ids, device)
        state = step(self._features.index_select(0, rows), latest, every, 0)
        picked = PickedTokens(len(every), int(batch.limits.max()))
        generate(state, every, batch.limits, self._pick, advance, picked)
        picked.scale(is_known)
        return picked

    def _write_keys(self, hidden: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        """Write the keys and values of T tokens; return their features."""
        features = self._head.features(hidden)
        k, v = self._head.keys_and_values(features, next_ids, positions)
        keys, values = cache_rows(self._kv, self._layer.layer_id)
        keys.write(slots, k)
        if self._layer.value_prefix_dim is None:
            values.write(slots, v)
        return (features,)

    def _pick(self, state: Tensor) -> tuple[Tensor, Tensor]:
        token_ids, probabilities = self._choose(state)
        return token_ids.clone(), probabilities.clone()

    def _most_probable(self, state: Tensor) -> tuple[Tensor, ...]:
        idx, probabilities = most_probable(self._head.logits(state))
        return self._head.token_ids(idx), probabilities

    def _next_ids(self, plan: StepPlan, sampled: Tensor | None) -> Tensor:
        """Return the token after each of the step's tokens, int64 [T]; after rejected drafts, it has no meaning."""
        if sampled is not None and len(plan.sample_idx) == plan.num_tokens:
            return sampled
        next_ids = np.zeros(plan.num_tokens, dtype=np.int64)
        next_ids[:-1] = plan.input_ids[1:]
        next_ids[plan.query_lens.cumsum() - 1] = 0 if plan.next_ids is None else plan.next_ids
        on_device = to_device(np.maximum(next_ids, 0), self._device)  # the ids of media are negative
        if sampled is not None:
            on_device.index_copy_(0, to_device(plan.sample_token_idx, self._device), sampled)
        return on_device

    def _last_tokens(
        self, plan: StepPlan, drafts: DraftSamples | None, counted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return rows, int64 [B'], and the index of the last token of each that counts, int64 [B']."""
        device = self._device
        if drafts is None or counted is None:
            return to_device(plan.rows.astype(np.int64), device), to_device(
                plan.query_lens.cumsum(dtype=np.int64) - 1, device
            )
        last = to_device(plan.sample_token_idx, device).index_select(0, drafts.latest_idx(counted))
        return to_device(plan.rows[plan.sample_idx[drafts.lasts]].astype(np.int64), device), last
