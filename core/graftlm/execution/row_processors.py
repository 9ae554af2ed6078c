"""Runs the logits processors of each request on its row of the logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import LogitsContext, LogitsProcessor
from graftlm.errors import RequestFailedError
from graftlm.plan import RowSetup

__all__ = ["MakeProcessor", "RowProcessors"]

#: Function that creates a processor from its name, options and context.
MakeProcessor: TypeAlias = Callable[[str, Mapping[str, Any], LogitsContext], LogitsProcessor]


@dataclass(frozen=True, slots=True)
class _Row:
    """The processors of one row, by name, and its output so far."""

    processors: dict[str, LogitsProcessor]
    output_token_ids: list[int]


class RowProcessors:
    """Stores the logits processors of rows, and the output tokens of rows with processors.

    Processors get the output tokens on the host. Sampling therefore waits for the device in a step that has a row with
    processors.
    """

    def __init__(self, num_rows: int, vocab_size: int, make_processor: MakeProcessor) -> None:
        self._vocab_size = vocab_size
        self._make = make_processor
        self._active = np.zeros(num_rows, dtype=np.bool_)
        self._rows: dict[int, _Row] = {}

    def set_row(self, setup: RowSetup) -> None:
        """Create a request's processors.

        Raises:
            RequestFailedError: the creation of a processor failed; the row then has no processors.
        """
        self.clear_row(setup.row)
        if not setup.params.logits_processors:
            return
        context = LogitsContext(self._vocab_size, setup.prompt_token_ids)
        processors = {
            name: self._create(name, options, context) for name, options in setup.params.logits_processors.items()
        }
        self._rows[setup.row] = _Row(processors, setup.output_token_ids.tolist())
        self._active[setup.row] = True

    def clear_row(self, row: int) -> None:
        """Remove a row's processors."""
        self._active[row] = False
        self._rows.pop(row, None)

    def active(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows have processors, bool [n]."""
        return self._active[rows]

    def apply(
        self,
        logits: Tensor,
        samples: NDArray[np.int64],
        rows: NDArray[np.int64],
        drafted: Mapping[int, NDArray[np.int64]],
    ) -> dict[int, str]:
        """Run each row's processors on its logits, in place.

        Args:
            logits: float32 [n, V].
            samples: int64 [n], indices into S of the rows of `logits`, ascending.
            rows: int64 [S], row of each sample.
            drafted: sample index -> the drafts before the sample; samples without drafts are missing.

        Returns: sample index -> error of a sample that failed. If a sample without drafts before it fails, the
            processors of its row are removed.
        """
        failures: dict[int, str] = {}
        failed_rows: set[int] = set()
        for local in np.flatnonzero(self._active[rows[samples]]).tolist():
            sample = int(samples[local])
            row = int(rows[sample])
            if row in failed_rows:
                continue
            try:
                logits[local] = _process(self._rows[row], drafted.get(sample), logits[local])
            except RequestFailedError as error:
                failures[sample] = str(error)
                if sample not in drafted:
                    failed_rows.add(row)
        for row in failed_rows:
            self.clear_row(row)
        return failures

    def record(self, rows: NDArray[np.int64], token_ids: Tensor, counted: Tensor | None) -> None:
        """Append sampled tokens to the rows' outputs. Waits for the device if a row has processors.

        Args:
            token_ids: int64 [S], the sampled tokens, on the device.
            counted: bool [S], on the device: which tokens to append; None: all tokens.
        """
        local = np.flatnonzero(self._active[rows])
        if len(local):
            tokens = token_ids.tolist()
            is_counted = None if counted is None else counted.tolist()
            for i in local.tolist():
                if is_counted is None or is_counted[i]:
                    self._rows[int(rows[i])].output_token_ids.append(tokens[i])

    def _create(self, name: str, options: Mapping[str, Any], context: LogitsContext) -> LogitsProcessor:
        try:
            return self._make(name, options, context)
        except Exception as error:  # a plugin's code: any exception fails this request only
            raise RequestFailedError(
                f"logits processor {name!r} could not be created: {type(error).__name__}: {error}"
            ) from error


def _process(row: _Row, drafts: NDArray[np.int64] | None, logits: Tensor) -> Tensor:
    """Run a row's processors in order on the logits, float32 [V], that follow its output and `drafts`.

    Raises:
        RequestFailedError: a processor raised, or returned something other than logits.
    """
    history = np.array(row.output_token_ids, dtype=np.int32)
    if drafts is not None:
        history = np.concatenate((history, drafts.astype(np.int32)))
    for name, processor in row.processors.items():
        try:
            result: object = processor.process(history.copy(), logits)
        except Exception as error:  # a plugin's code: any exception fails this request only
            raise RequestFailedError(f"logits processor {name!r} failed: {type(error).__name__}: {error}") from error
        logits = _checked(name, result, logits)
    return logits


def _checked(name: str, result: object, given: Tensor) -> Tensor:
    expected = f"{given.dtype} {list(given.shape)} on {given.device}"
    if not isinstance(result, Tensor):
        raise RequestFailedError(
            f"logits processor {name!r} returned {type(result).__name__}; expected a tensor, {expected}"
        )
    if (result.dtype, result.shape, result.device) != (given.dtype, given.shape, given.device):
        got = f"{result.dtype} {list(result.shape)} on {result.device}"
        raise RequestFailedError(f"logits processor {name!r} returned {got}; expected {expected}")
    return result
