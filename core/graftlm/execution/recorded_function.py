"""Records a function of tensors on a CPU once per number of rows, and then repeats its kernel calls without Python."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import GraphCaptureError
from graftlm.execution.recorded_steps import MAX_RECORDED_SIZE, OtherResultError, Recording, record

__all__ = ["RecordedFunction", "TensorFunction"]

_logger = logging.getLogger(__name__)

#: Function from tensors with the same number of rows to tensors; it makes the same kernel calls for all values.
TensorFunction = Callable[..., tuple[Tensor, ...]]


class RecordedFunction:
    """Calls a function, or repeats its recorded kernel calls.

    The first call with a number of rows is recorded. The second call runs both the function and the recording in memory
    filled with NaN. If the results differ, the function is not recorded any more.

    Args:
        name: what the function computes, for messages.
        function: the function. It stores no tensor, and may change other tensors in place only if a repeated call
            changes nothing.
        is_recorded: whether calls are recorded; if False, each call runs the function.
    """

    def __init__(self, name: str, function: TensorFunction, *, is_recorded: bool) -> None:
        self._name = name
        self._function = function
        self._is_recorded = is_recorded
        self._calls: dict[tuple[int, int], _RecordedCall] = {}  # (rows, threads) -> recording

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the function's results for inputs [T, ...]; they are valid until the next call.

        Called in inference mode.
        """
        size = inputs[0].shape[0]
        if not self._is_recorded or size > MAX_RECORDED_SIZE:
            return self._function(*inputs)
        key = size, torch.get_num_threads()
        call = self._calls.get(key)
        try:
            if call is None:
                call = self._calls[key] = self._recorded(inputs)
                return call.outputs
            for own, given in zip(call.inputs, inputs, strict=True):
                own.copy_(given)
            if not call.is_checked:
                return self._checked(call, inputs)
            call.recording.repeat()
        except OtherResultError:
            return self._function(*inputs)  # raises the actual error
        except GraphCaptureError as error:
            self._is_recorded = False
            self._calls.clear()
            _logger.info("%s is not recorded: %s", self._name, error)
            return self._function(*inputs)
        return call.outputs

    def _recorded(self, inputs: tuple[Tensor, ...]) -> "_RecordedCall":
        own = tuple([tensor.clone() for tensor in inputs])
        found: list[tuple[Tensor, ...]] = []
        recording = record(lambda: found.append(self._function(*own)))
        outputs = tuple([recording.memory.borrowed(tensor) for tensor in found.pop()])
        return _RecordedCall(recording, own, outputs)

    def _checked(self, call: "_RecordedCall", inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        expected = self._function(*inputs)
        if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in expected):
            return expected  # NaN may also come from memory that the recording did not write: check a later call
        call.recording.memory.fill_nan()
        call.recording.repeat()
        if not all(torch.equal(one, other) for one, other in zip(expected, call.outputs, strict=True)):
            raise GraphCaptureError("repeated calls gave other results: not all calls were recorded")
        call.is_checked = True
        return expected


@dataclass(slots=True)
class _RecordedCall:
    """A recording with the tensors that it reads and returns."""

    recording: Recording
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    is_checked: bool = False
