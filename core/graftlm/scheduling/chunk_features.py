"""The parts of a step plan that pictures add: feature spans, and positions for the rotary embedding."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.memory import RequestTable
from graftlm.plan import FeatureSpan
from graftlm.scheduling.request import Request

__all__ = ["decode_rope_positions", "feature_spans", "rope_positions"]


class _Chunk(Protocol):
    @property
    def request(self) -> Request: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def feature_spans(chunks: Sequence[_Chunk], token_starts: Sequence[int]) -> tuple[FeatureSpan, ...]:
    """Return the feature spans of chunks, given the index of each chunk's first token among the step's tokens."""
    spans = []
    for chunk, token_start in zip(chunks, token_starts, strict=True):
        media = chunk.request.media
        for rows in () if media is None else media.within(chunk.start, chunk.end):
            spans.append(FeatureSpan(rows.item.key, rows.first, rows.positions - chunk.start + token_start))
    return tuple(spans)


def rope_positions(
    table: RequestTable,
    token_rows: NDArray[np.int32],
    positions: NDArray[np.int64],
    chunks: Sequence[_Chunk],
    token_starts: Sequence[int],
) -> NDArray[np.int64] | None:
    """Return `StepPlan.rope_positions` of a step with chunks, or None.

    Args:
        token_rows: int32 [T], the row of each token.
        positions: int64 [T].
        token_starts: index of each chunk's first token.
    """
    own = [chunk.request.media is not None and chunk.request.media.rope_positions is not None for chunk in chunks]
    if not table.num_shifted and not any(own):
        return None
    shifted = np.tile(positions + table.rope_offset[token_rows], (3, 1))
    for chunk, token_start, is_own in zip(chunks, token_starts, own, strict=True):
        media = chunk.request.media
        if is_own and media is not None and media.rope_positions is not None:
            prompt = media.rope_positions[:, chunk.start : chunk.end]
            shifted[:, token_start : token_start + prompt.shape[1]] = prompt
    return shifted


def decode_rope_positions(
    table: RequestTable, rows: NDArray[np.int32], positions: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return `StepPlan.rope_positions` of a step with decode rows only, int64 [T]; None if no row is shifted."""
    return positions + table.rope_offset[rows] if table.num_shifted else None
