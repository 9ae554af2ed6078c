"""Encodes plans and results for the sockets between a scheduler and its ranks.

A plan has two frames: a MessagePack header, and the arrays one after the other, those of eight-byte numbers first. The
header has the shape of each array. Nothing is pickled.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.errors import InvariantError
from graftlm.plan import (
    LateMask,
    LogprobTable,
    PoolSpan,
    PromptLogprobSpan,
    RowSetup,
    StepPlan,
    StepResult,
    WindowTables,
)
from graftlm.pooling.pooling import Pooling
from graftlm.sampling_params import SamplingParams, changed_fields

__all__ = ["PlanDecoder", "decode_result", "encode_plan", "encode_result"]

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
#: Shape of an array; None: there is no array.
_Shape = tuple[int, ...] | None
#: A one-dimensional or larger array: dtype, shape and content.
_Array = tuple[str, tuple[int, ...], bytes]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a plan.

    Attributes:
        shapes: shapes of the arrays in the order of `_arrays_of`.
        rest: the other fields of the plan as plain data; None: they are empty.
    """

    step_id: int
    num_decodes: int
    shapes: list[_Shape]
    rest: "_Rest | None" = None


class _Rest(msgspec.Struct, frozen=True, array_like=True):
    setups: list[tuple[int, str, dict[str, Any], int, bytes, bytes, tuple[int, ...]]]
    prompt_spans: list[tuple[int, int, bytes, int, tuple[int, ...]]]
    pool_spans: list[tuple[int, str, tuple[int, ...], int, int, bool]]
    copies: list[list[tuple[int, int, bytes]]] | None


class _Result(msgspec.Struct, frozen=True, array_like=True):
    step_id: int
    model_s: float
    token_ids: _Array
    errors: dict[int, str]
    logprobs: list[_Array | None] | None
    prompt_logprobs: list[list[_Array | None]]
    pooled: list[_Array]


_encoder = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(_Header)
_results = msgspec.msgpack.Decoder(_Result)


def encode_plan(plan: StepPlan) -> list[bytes]:
    """Return the frames of a plan. The bits of a late mask are sent separately.

    Raises:
        InvariantError: the plan has recurrent states or pictures, which ranks do not support.
    """
    if plan.state is not None or plan.media_work is not None or plan.feature_spans:
        raise InvariantError(f"step {plan.step_id} has states or pictures, which ranks do not support")
    arrays = _arrays_of(plan)
    rest = None
    if plan.setups or plan.prompt_spans or plan.pool_spans or plan.copies is not None:
        rest = _rest_of(plan)
    shapes = [None if array is None else array.shape for array in arrays]
    header = _encoder.encode(_Header(plan.step_id, plan.num_decodes, shapes, rest))
    return [header, b"".join([array.tobytes() for array in arrays if array is not None])]


def _arrays_of(plan: StepPlan) -> list[NDArray[Any] | None]:
    """Return the arrays of a plan: `_NUM_INT64` arrays of int64, then arrays of int32."""
    window, mask = plan.window, plan.token_mask
    return [
        plan.input_ids,
        plan.device_idx,
        plan.positions,
        plan.out_slots,
        plan.sample_idx,
        plan.sample_positions,
        None if window is None else window.out_slots,
        None if mask is None else mask.idx,
        plan.next_ids,
        plan.rows,
        plan.query_lens,
        plan.seq_lens,
        plan.page_table,
        None if window is None else window.page_table,
        plan.adapter_slots,
        plan.num_drafts,
    ]


_NUM_INT64: Final = 9


class PlanDecoder:
    """Decodes plans. Rows that are equal to those of the previous plan are the same array object, as in the sender."""

    def __init__(self) -> None:
        self._rows = np.empty(0, dtype=np.int32)

    def decode(self, frames: Sequence[bytes]) -> StepPlan:
        """Return the plan of two frames. Its arrays are writable; the future of a late mask is not set."""
        header = _headers.decode(frames[0])
        arrays = _split(bytearray(frames[1]), header.shapes)
        (
            input_ids, device_idx, positions, out_slots, sample_idx, sample_positions, window_slots, mask_idx, next_ids,
            rows, query_lens, seq_lens, page_table, window_table, adapter_slots, num_drafts,
        ) = arrays  # fmt: skip
        if len(rows) == len(self._rows) and (rows == self._rows).all():
            rows = self._rows
        self._rows = rows
        rest = header.rest
        return StepPlan(
            step_id=header.step_id,
            rows=rows,
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_table=page_table,
            input_ids=input_ids,
            device_idx=device_idx,
            positions=positions,
            out_slots=out_slots,
            num_decodes=header.num_decodes,
            sample_idx=sample_idx,
            sample_positions=sample_positions,
            setups=() if rest is None else tuple(map(_setup, rest.setups)),
            prompt_spans=() if rest is None else tuple(map(_prompt_span, rest.prompt_spans)),
            pool_spans=() if rest is None else tuple(map(_pool_span, rest.pool_spans)),
            token_mask=None if mask_idx is None else LateMask(mask_idx),
            window=None if window_table is None else WindowTables(window_table, window_slots),
            copies=None if rest is None or rest.copies is None else _copies(rest.copies),
            adapter_slots=adapter_slots,
            num_drafts=num_drafts,
            next_ids=next_ids,
        )


def _split(data: bytearray, shapes: Sequence[_Shape]) -> list[Any]:
    arrays: list[NDArray[Any] | None] = []
    at = 0
    for i, shape in enumerate(shapes):
        if shape is None:
            arrays.append(None)
            continue
        dtype = _INT64 if i < _NUM_INT64 else _INT32
        size = 1
        for length in shape:
            size *= length
        array = np.frombuffer(data, dtype, size, at) if size else np.empty(0, dtype)
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
        at += size * dtype.itemsize
    return arrays


def _rest_of(plan: StepPlan) -> _Rest:
    copies = plan.copies
    return _Rest(
        setups=[
            (
                setup.row,
                setup.request_id,
                changed_fields(setup.params),
                setup.seed,
                setup.prompt_token_ids.tobytes(),
                setup.output_token_ids.tobytes(),
                setup.stop_token_ids,
            )
            for setup in plan.setups
        ],
        prompt_spans=[
            (span.row, span.start, span.targets.tobytes(), span.num_top, span.requested) for span in plan.prompt_spans
        ],
        pool_spans=[
            (span.row, span.pooling.way, span.pooling.token_ids, span.start, span.num_tokens, span.is_last)
            for span in plan.pool_spans
        ],
        copies=None
        if copies is None
        else [
            [(copy.slot, copy.first_page, copy.pages.tobytes()) for copy in group]
            for group in (copies.early_stores, copies.early_loads, copies.loads, copies.stores)
        ],
    )


def _setup(fields: tuple[int, str, dict[str, Any], int, bytes, bytes, tuple[int, ...]]) -> RowSetup:
    row, request_id, params, seed, prompt, output, stop_token_ids = fields
    prompt_ids, output_ids = (np.frombuffer(data, dtype=np.int32) for data in (prompt, output))
    return RowSetup(row, request_id, SamplingParams(**params), seed, prompt_ids, output_ids, stop_token_ids)


def _prompt_span(fields: tuple[int, int, bytes, int, tuple[int, ...]]) -> PromptLogprobSpan:
    row, start, targets, num_top, requested = fields
    return PromptLogprobSpan(row, start, np.frombuffer(bytearray(targets), dtype=np.int64), num_top, requested)


def _pool_span(fields: tuple[int, str, tuple[int, ...], int, int, bool]) -> PoolSpan:
    row, way, token_ids, start, num_tokens, is_last = fields
    return PoolSpan(row, Pooling(way, token_ids), start, num_tokens, is_last)


def _copies(groups: list[list[tuple[int, int, bytes]]]) -> StepCopies:
    made = (
        tuple(BlockCopy(slot, first, np.frombuffer(bytearray(pages), dtype=np.int32)) for slot, first, pages in group)
        for group in groups
    )
    return StepCopies(*made)


# -- results -----------------------------------------------------------------------------------------------------------


def encode_result(step_id: int, result: StepResult) -> bytes:
    """Return the frame of a step's result."""
    return _encoder.encode(
        _Result(
            step_id,
            result.model_s,
            _packed(result.token_ids),
            result.errors,
            None if result.logprobs is None else _table_arrays(result.logprobs),
            [_table_arrays(table) for table in result.prompt_logprobs],
            [_packed(vector) for vector in result.pooled],
        )
    )


def decode_result(frame: bytes) -> tuple[int, StepResult]:
    """Return a step's id and its result."""
    found = _results.decode(frame)
    return found.step_id, StepResult(
        token_ids=_unpacked(found.token_ids),
        errors=found.errors,
        logprobs=None if found.logprobs is None else _table(found.logprobs),
        prompt_logprobs=tuple(map(_table, found.prompt_logprobs)),
        model_s=found.model_s,
        pooled=tuple(map(_unpacked, found.pooled)),
    )


def _table_arrays(table: LogprobTable) -> list[_Array | None]:
    arrays = (table.token_logprobs, table.top_ids, table.top_logprobs, table.requested)
    return [None if array is None else _packed(array) for array in arrays]


def _table(arrays: list[_Array | None]) -> LogprobTable:
    return LogprobTable(*[None if array is None else _unpacked(array) for array in arrays])  # type: ignore[arg-type]


def _packed(array: NDArray[Any]) -> _Array:
    return array.dtype.str, array.shape, array.tobytes()


def _unpacked(array: _Array) -> NDArray[Any]:
    dtype, shape, data = array
    return np.frombuffer(data, dtype).reshape(shape)
