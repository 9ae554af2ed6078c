"""Generates tokens greedily for several sequences, one token per sequence and step, without waiting for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import Continuations, ForwardBatch
from graftlm.execution.batch import to_device
from graftlm.execution.readback import Readback

__all__ = [
    "Advance",
    "LaunchedTokens",
    "Pick",
    "PickedTokens",
    "decode_batch",
    "forward_batch",
    "generate",
    "most_probable",
]

#: Function from states [B, F] to the next token of each sequence, int64 [B], and its probability, float32 [B].
Pick = Callable[[Tensor], tuple[Tensor, Tensor]]
#: Function from the states [B, F], the tokens that were picked, int64 [B], and the indices of the B sequences and the
#: number of tokens generated before, to the next states.
Advance = Callable[[Tensor, Tensor, NDArray[np.intp], int], Tensor]


class PickedTokens:
    """Generated tokens on the device, which one copy moves to the host.

    Args:
        num_rows: number of sequences.
        longest: largest number of tokens of a sequence.
    """

    def __init__(self, num_rows: int, longest: int) -> None:
        self._shape = num_rows, longest
        self._rows: list[NDArray[np.intp]] = []
        self._token_ids: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: NDArray[np.intp], token_ids: Tensor, probabilities: Tensor) -> None:
        """Add the next token of some sequences."""
        self._rows.append(rows)
        self._token_ids.append(token_ids)
        self._probabilities.append(probabilities)

    def scale(self, factors: Tensor) -> None:
        """Multiply the probabilities of each sequence by a factor, float32 [num_rows]."""
        device = factors.device
        for i, (rows, probabilities) in enumerate(zip(self._rows, self._probabilities, strict=True)):
            self._probabilities[i] = probabilities * factors.index_select(0, to_device(rows, device))

    def launch_copy(self, readback: Readback) -> "LaunchedTokens":
        """Launch the copy of the tokens to the host."""
        both = None
        if self._rows:
            token_ids = torch.cat(self._token_ids).int()
            both = readback.fetch(torch.stack([token_ids, torch.cat(self._probabilities).view(torch.int32)]))
        readback.close()
        return LaunchedTokens(readback, self._shape, self._rows, both)


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """Generated tokens whose copy to the host was launched.

    Attributes:
        shape: number of sequences, and largest number of tokens of a sequence.
        rows: for each position, the sequences with a token there.
        both: int32 [2, N], tokens and bits of the probabilities of all positions; None if there are none.
    """

    readback: Readback
    shape: tuple[int, int]
    rows: Sequence[NDArray[np.intp]]
    both: Tensor | None

    def result(self) -> Continuations:
        """Wait for the copy, and return the tokens."""
        found = Continuations(np.zeros(self.shape, dtype=np.int32), np.zeros(self.shape, dtype=np.float32))
        self.readback.wait()
        if self.both is not None:
            rows = np.concatenate(self.rows)
            positions = np.repeat(np.arange(len(self.rows)), [len(rows) for rows in self.rows])
            on_host = self.both.numpy()
            found.token_ids[rows, positions] = on_host[0]
            found.probabilities[rows, positions] = on_host[1].view(np.float32)
        return found


def generate(
    state: Tensor, rows: NDArray[np.intp], limits: NDArray[np.int32], pick: Pick, advance: Advance, into: PickedTokens
) -> None:
    """Generate tokens after sequences.

    Args:
        state: [B, F], one state for each of the sequences `rows`.
        rows: int64 [B], indices of the sequences that generate at least one token.
        limits: int32, number of tokens to generate for every sequence.
        pick: chooses tokens from states.
        advance: computes the states after the chosen tokens; not called after the last token.
        into: receives the tokens.
    """
    device = state.device
    while len(rows):
        token_ids, probabilities = pick(state)
        into.add(rows, token_ids, probabilities)
        kept = np.flatnonzero(limits[rows] > len(into))
        if len(kept) < len(rows):
            rows = rows[kept]
            idx = to_device(kept, device)
            token_ids, state = token_ids.index_select(0, idx), state.index_select(0, idx)
        if len(rows):
            state = advance(state, token_ids, rows, len(into) - 1)


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the largest of each row of logits [B, N], int64 [B], and its probability, float32 [B]."""
    logits = logits.float()
    largest, idx = logits.max(dim=1)
    return idx, torch.exp(largest - torch.logsumexp(logits, dim=1))


def decode_batch(
    token_ids: Tensor, positions: NDArray[np.int64], table: NDArray[np.int32], page_size: int, device: torch.device
) -> ForwardBatch:
    """Return the forward batch of one token per sequence.

    Args:
        token_ids: int64 [B].
        positions: int64 [B], position of each token; all earlier positions are in memory.
        table: int32 [B, P], the page table.
    """
    of_token = np.arange(len(positions))
    lens = np.ones(len(positions), dtype=np.int32)
    return forward_batch(token_ids, positions, of_token, lens, table, page_size, device)


def forward_batch(
    token_ids: Tensor,
    positions: NDArray[np.int64],
    of_token: NDArray[np.int64],
    query_lens: NDArray[np.int32],
    table: NDArray[np.int32],
    page_size: int,
    device: torch.device,
) -> ForwardBatch:
    """Return a forward batch of T tokens of B sequences; sequences with one token come first.

    Args:
        token_ids: int64 [T].
        positions: int64 [T].
        of_token: int64 [T], the sequence of each token.
        query_lens: int32 [B], number of tokens of each sequence.
        table: int32 [B, P], the page table.
    """
    ends = np.cumsum(query_lens, dtype=np.int32)
    seq_lens = (positions[ends - 1] + 1).astype(np.int32)
    out_slots = table[of_token, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return ForwardBatch(
        input_ids=token_ids,
        positions=to_device(positions, device),
        out_slots=to_device(out_slots, device),
        cu_seqlens_q=to_device(np.concatenate([np.zeros(1, dtype=np.int32), ends]), device),
        seq_lens=to_device(seq_lens, device),
        page_table=to_device(table, device),
        logits_idx=to_device(ends.astype(np.int64) - 1, device),
        num_decodes=int((query_lens == 1).sum()),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        page_table_cpu=table,
    )
