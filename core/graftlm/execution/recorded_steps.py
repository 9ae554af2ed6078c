"""Steps on a CPU without the Python between kernels: recorded once for a number of requests, then repeated."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graftlm.contracts import AttentionBackend, ForwardBatch
from graftlm.errors import GraphCaptureError
from graftlm.execution.batch import build_batch
from graftlm.layers.native_calls import heard_by
from graftlm.plan import StepPlan

__all__ = ["MAX_RECORDED_SIZE", "RecordedSteps", "Recording", "record"]

_logger = logging.getLogger(__name__)

#: With more requests, kernels take so long that what is between them hardly counts.
MAX_RECORDED_SIZE: Final = 64
_LINE: Final = 64  # bytes; where tensors begin
#: What makes tensors without computing anything.
_ALLOCATIONS: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
_UNREPEATABLE: Final = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


class _Memory:
    """Memory of the tensors of a recording: it stays, and takes another tensor once one is gone."""

    def __init__(self) -> None:
        self.blocks: list[NDArray[np.uint8]] = []
        self._addresses: set[int] = set()
        self._free: list[NDArray[np.uint8]] = []
        self._taken: list[tuple[StorageWeakRef, NDArray[np.uint8]]] = []

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor of the same size, strides and dtype."""
        num_bytes = tensor.untyped_storage().nbytes()
        block = self._block(num_bytes)
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())
        self._taken.append((StorageWeakRef(made.untyped_storage()), block))  # type: ignore[no-untyped-call]
        return made

    def _block(self, num_bytes: int) -> NDArray[np.uint8]:
        alive = []
        for reference, block in self._taken:
            if reference.expired():  # type: ignore[no-untyped-call]
                self._free.append(block)
            else:
                alive.append((reference, block))
        self._taken = alive
        for i, block in enumerate(self._free):
            if len(block) == max(num_bytes, 1):
                return self._free.pop(i)
        whole = np.empty(max(num_bytes, 1) + _LINE, dtype=np.uint8)
        start = -whole.ctypes.data % _LINE
        block = whole[start : start + max(num_bytes, 1)]
        self.blocks.append(block)
        self._addresses.add(block.ctypes.data)
        return block

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in this memory."""
        return _address(tensor) in self._addresses

    def spoil(self) -> None:
        """Overwrite everything with bytes that are NaN in any floating dtype."""
        for block in self.blocks:
            block.fill(0xFF)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears what a function has computed: kernels' calls and PyTorch's operations, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.memory = _Memory()
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch would import its compiler for that, seconds into the first step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _UNREPEATABLE):
            raise GraphCaptureError(f"{func} depends on what tensors hold, or on chance")
        out = func(*args, **kwargs)
        if func._schema.name in _ALLOCATIONS:
            return self.memory.like(out)
        made = [out] if isinstance(out, Tensor) else out
        if not (isinstance(made, list | tuple) and all(isinstance(tensor, Tensor) for tensor in made)):
            raise GraphCaptureError(f"{func} takes a value out of a tensor")
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
        elif not _are_views(made, args):
            self.calls.append((_repeat_into, (made, func, args, kwargs), {}))
        # Addresses of these may be among a kernel's arguments, which keep nothing.
        self._kept += [tensor for tensor in made if not self.memory.holds(tensor)]
        return out

    def heard(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Note a kernel's call."""
        self.calls.append((function, arguments, {}))

    def repeat(self) -> None:
        """Compute again, on the same tensors."""
        for function, arguments, options in self.calls:
            function(*arguments, **options)


def record(function: Callable[[], None]) -> Recording:
    """Run a function, and return what repeats its work.

    Raises:
        GraphCaptureError: it does what cannot be repeated, as far as can be seen, or fails.
    """
    recording = Recording()
    try:
        with recording, heard_by(recording.heard):
            function()
    except GraphCaptureError:
        raise
    except Exception as error:  # which may come from being heard: without that, the model may do well
        raise GraphCaptureError(f"it fails while it is recorded: {error!r}") from error
    return recording


def _are_views(made: Sequence[Tensor], args: Any) -> bool:
    """Whether what an operation returned is memory that it was given: then it computed nothing."""
    given = {_address(arg) for arg in args if isinstance(arg, Tensor)}
    return all(_address(tensor) in given for tensor in made)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _repeat_into(made: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    out = func(*args, **kwargs)
    for tensor, again in zip(made, [out] if isinstance(out, Tensor) else out, strict=True):
        tensor.copy_(again)


class RecordedSteps:
    """Runs a model's forward pass for steps in which a few requests bring one token each.

    The first step of a size is recorded while it runs. The second runs twice, as the model has it and as recorded over
    memory that holds nothing: if the two differ, every step runs as the model has it from then on.

    Args:
        attention, forward: the model's backend and its forward pass, both of which repeat their calls.
        num_rows: R, rows of the request table.
        max_size: requests of a step at most.

    Attributes:
        last_tokens: int64 [R], each row's latest sampled token; whoever samples writes it.
        num_replays: steps that have been repeated.
    """

    def __init__(
        self,
        attention: AttentionBackend,
        forward: Callable[[ForwardBatch], Tensor],
        num_rows: int,
        max_size: int = MAX_RECORDED_SIZE,
    ) -> None:
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64)
        self.num_replays = 0
        self._attention = attention
        self._forward = forward
        self._input_ids, self._positions = torch.zeros(2, max_size, dtype=torch.int64)
        #: By the number of requests, and of threads.
        self._steps: dict[tuple[int, int], _RecordedStep] | None = {}

    def recapture(self) -> None:
        """Forget what has been recorded, since the model computes with other tensors than before. Between two steps."""
        if self._steps is not None:
            self._steps.clear()

    @torch.inference_mode()
    def replay(self, plan: StepPlan) -> Tensor | None:
        """Run a step's forward pass.

        Returns: hidden states [T, hidden], valid until the next replay; None if steps like this one are not recorded: a
            request brings more than one token or has an adapter, there are too many, or pages arrive from host memory
            layer by layer.
        """
        size = plan.num_tokens
        if self._steps is None or size != plan.num_decodes or size > len(self._positions):
            return None
        if plan.copies is not None or plan.adapter_slots is not None:
            return None
        batch = self._prepared(plan)
        key = (size, torch.get_num_threads())
        step = self._steps.get(key)
        try:
            if step is None:
                step = self._steps[key] = self._recorded(batch)
            elif not step.is_checked:
                self._check(step, batch)
            else:
                step.recording.repeat()
                self.num_replays += 1
        except GraphCaptureError as error:
            self._steps = None
            _logger.info("steps are not recorded: %s", error)
            return None
        return step.hidden

    def _prepared(self, plan: StepPlan) -> ForwardBatch:
        """Build the step's batch, put what the model reads of it where recorded calls find it, and tell the backend."""
        batch = build_batch(plan, self.last_tokens, self._positions.device)
        input_ids, positions = self._input_ids[: plan.num_tokens], self._positions[: plan.num_tokens]
        input_ids.copy_(batch.input_ids)
        positions.copy_(batch.positions)
        self._attention.prepare(batch)
        return replace(batch, input_ids=input_ids, positions=positions)

    def _recorded(self, batch: ForwardBatch) -> "_RecordedStep":
        hidden: list[Tensor] = []
        recording = record(lambda: hidden.append(self._forward(batch)))
        return _RecordedStep(recording, hidden[0])

    def _check(self, step: "_RecordedStep", batch: ForwardBatch) -> None:
        expected = self._forward(batch)
        step.recording.memory.spoil()
        step.recording.repeat()
        if not torch.equal(expected, step.hidden):
            raise GraphCaptureError("repeated calls gave other hidden states than the model: not all were heard")
        step.is_checked = True


@dataclass(slots=True)
class _RecordedStep:
    recording: Recording
    hidden: Tensor
    is_checked: bool = False
