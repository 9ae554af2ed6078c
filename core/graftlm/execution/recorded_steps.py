"""Records decode steps on a CPU once per batch size, and then replays them without Python code between kernels."""

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graftlm.contracts import AttentionBackend, ForwardBatch
from graftlm.errors import GraphCaptureError
from graftlm.execution.batch import BatchBuilder
from graftlm.execution.state_inputs import StateInputs
from graftlm.layers.native_calls import heard_by
from graftlm.plan import StepPlan

__all__ = ["MAX_RECORDED_SIZE", "OtherResultError", "RecordedSteps", "Recording", "record"]

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

#: Maximum batch size of recorded steps. In larger batches, the Python time between kernels is negligible.
MAX_RECORDED_SIZE: Final = 64
_LINE: Final = 64  # alignment of tensors in bytes
#: Operations that create tensors without computation.
_ALLOCATIONS: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
_UNREPEATABLE: Final = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


class _Memory:
    """The tensor memory of recordings. Blocks are not freed; a block is reused after its tensor was deleted.

    Recordings that never run at the same time share this memory, like CUDA graphs that share a memory pool. After a
    step, only its hidden states remain in the memory.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, NDArray[np.uint8]] = {}  # address -> block
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # capacity -> addresses of free blocks
        self._taken: list[tuple[StorageWeakRef, int]] = []

    @property
    def is_free(self) -> bool:
        """Whether all tensors in this memory were deleted."""
        self._collect()
        return not self._taken

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor of the same size, strides and dtype."""
        at = self._take(tensor.untyped_storage().nbytes())
        made = self._over(self.blocks[at], tensor)
        self._taken.append((StorageWeakRef(made.untyped_storage()), at))  # type: ignore[no-untyped-call]
        return made

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a view that does not prevent reuse of its block. A tensor in other memory is returned unchanged."""
        block = self.blocks.get(_address(tensor) or 0)
        return tensor if block is None else self._over(block, tensor)

    def fill_nan(self) -> None:
        """Fill all blocks with bytes that are NaN in every floating dtype."""
        for block in self.blocks.values():
            block.fill(0xFF)

    @staticmethod
    def _over(block: NDArray[np.uint8], tensor: Tensor) -> Tensor:
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _take(self, num_bytes: int) -> int:
        self._collect()
        capacity = 1 << (max(num_bytes, _LINE) - 1).bit_length()  # a power of two, for reuse by other batch sizes
        if self._free[capacity]:
            return self._free[capacity].pop()
        whole = np.empty(capacity + _LINE, dtype=np.uint8)
        start = -whole.ctypes.data % _LINE
        block = whole[start : start + capacity]
        self.blocks[block.ctypes.data] = block
        return int(block.ctypes.data)

    def _collect(self) -> None:
        alive = []
        for reference, at in self._taken:
            if reference.expired():  # type: ignore[no-untyped-call]
                self._free[len(self.blocks[at])].append(at)
            else:
                alive.append((reference, at))
        self._taken = alive


class OtherResultError(Exception):
    """A kernel's return value differs from the recording, such as an out-of-memory code."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of compiled kernels and PyTorch operations in a function, in order.

    Args:
        memory: memory for the tensors that the function creates.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.memory = memory
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because otherwise PyTorch imports its compiler in the first step, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _UNREPEATABLE):
            raise GraphCaptureError(f"{func} depends on tensor values or on random numbers")
        out = func(*args, **kwargs)
        if func._schema.name in _ALLOCATIONS:
            return self.memory.like(out)
        made = _tensors_of(out)
        if made is None:
            raise GraphCaptureError(f"{func} reads a value of a tensor")
        if any(tensor.layout is not torch.strided for tensor in made):
            raise GraphCaptureError(f"{func} returns tensors that are not strided")
        # A result in the memory of an argument is not new: it is a view, or an argument that was changed in place.
        given = {_address(arg) for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)}
        kept = [tensor if _address(tensor) in given else self.memory.like(tensor).copy_(tensor) for tensor in made]
        # Recorded calls refer to views that do not prevent reuse, so that the memory of deleted tensors is reused.
        args, kwargs = tree_map_only(Tensor, self.memory.borrowed, (args, kwargs))
        if any(ours is not theirs for ours, theirs in zip(kept, made, strict=True)):
            self.calls.append(
                (_repeat_into, ([self.memory.borrowed(tensor) for tensor in kept], func, args, kwargs), {})
            )
        elif func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
        # Keep these tensors alive, because a kernel's arguments may be their addresses, which are not references.
        self._kept += [tensor for tensor in kept if self.memory.borrowed(tensor) is tensor]
        if out is None:
            return None
        return kept[0] if isinstance(out, Tensor) else type(out)(kept)

    def record_call(self, function: Callable[..., Any], arguments: tuple[Any, ...], result: object) -> None:
        """Record a call of a compiled kernel."""
        if result is None:
            self.calls.append((function, arguments, {}))
        else:
            self.calls.append((_repeat_with_result, (result, function, arguments), {}))

    def repeat(self) -> None:
        """Repeat the recorded calls on the same tensors.

        Raises:
            OtherResultError: a kernel's return value differs from the recording.
        """
        for function, arguments, options in self.calls:
            function(*arguments, **options)


def record(function: Callable[[], None], memory: _Memory | None = None) -> Recording:
    """Run a function, and return a recording of its kernel calls.

    Args:
        memory: memory for the tensors that the function creates; None: new memory. Recordings may share memory if only
            one of them runs at a time.

    Raises:
        GraphCaptureError: the function makes a call that cannot be repeated, or fails.
    """
    recording = Recording(_Memory() if memory is None else memory)
    try:
        with recording, heard_by(recording.record_call):
            function()
    except GraphCaptureError:
        raise
    except Exception as error:  # the recording itself may be the cause; without it, the model may run
        raise GraphCaptureError(f"the forward pass fails during recording: {error!r}") from error
    return recording


def _tensors_of(out: object) -> Sequence[Tensor] | None:
    """Return the tensors that an operation returned; None if it returned something else."""
    made = [] if out is None else [out] if isinstance(out, Tensor) else out
    if isinstance(made, list | tuple) and all(isinstance(tensor, Tensor) for tensor in made):
        return made
    return None


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for tensors without one, such as in oneDNN's layouts."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _repeat_into(kept: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    out = func(*args, **kwargs)
    for tensor, again in zip(kept, [out] if isinstance(out, Tensor) else out, strict=True):
        tensor.copy_(again)


def _repeat_with_result(result: object, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if function(*arguments) != result:
        raise OtherResultError


class _TokensOnly(ForwardBatch):
    """A batch that checks, while a step is recorded, that the model reads only fields that a recording updates."""

    __slots__ = ()

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Return a batch with the fields of `batch`; reading a field in `_VARYING_FIELDS` raises GraphCaptureError."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)})

    def __getattribute__(self, name: str) -> Any:
        if name in _VARYING_FIELDS:
            raise GraphCaptureError(f"the model reads the batch's {name}, which recorded calls do not read again")
        return super().__getattribute__(name)

    @property
    def num_requests(self) -> int:
        """Number of tokens. Without prefill, a model treats each token as a request."""
        return self.num_tokens


_VARYING_FIELDS: Final = frozenset(field.name for field in fields(ForwardBatch)) - {
    "input_ids",
    "positions",
    "num_decodes",
    "in_graph",
    "wanted_idx",  # None: all tokens
    "features",  # None
    "feature_idx",  # None
    "state",  # in memory that is filled before each replay; None without recurrent states
}


class RecordedSteps:
    """Replays a model's forward pass for steps with few tokens and without prefill.

    The first step of a size is recorded while it runs. The second step is run twice: by the model, and by the recording
    in memory filled with NaN. If the results differ, the model runs all later steps.

    Args:
        attention, forward: the model's attention backend and forward pass. `repeats_calls` must be True for both.
        num_rows: R, number of rows of the request table.
        max_size: maximum number of requests of a step.
        states: the recurrent states of each layer; empty if the model has none.

    Attributes:
        last_tokens: int64 [R], each row's latest sampled token; written by the sampler.
        num_replays: number of replayed steps.
    """

    def __init__(
        self,
        attention: AttentionBackend,
        forward: Callable[[ForwardBatch], Tensor],
        num_rows: int,
        max_size: int = MAX_RECORDED_SIZE,
        states: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64)
        self.num_replays = 0
        self._batches = BatchBuilder(self.last_tokens)
        self._attention = attention
        self._forward = forward
        self._input_ids, self._positions = torch.zeros(2, max_size, dtype=torch.int64)
        #: size -> views of the first `size` elements of `_input_ids` and `_positions`.
        self._inputs_by_size: dict[int, tuple[Tensor, Tensor]] = {}
        #: (number of tokens, whether the step has no drafts, number of threads) -> recorded step. None: recording has
        #: failed, and the model runs all steps.
        self._steps: dict[tuple[int, bool, int], _RecordedStep] | None = {}
        self._memory = _Memory()
        self._records_drafts = True
        self._state_inputs = StateInputs(max_size, states)

    @property
    def uses_packed_weights(self) -> bool:
        """Always True, because recorded kernel calls contain addresses of packed weights."""
        return True

    def recapture(self) -> None:
        """Delete all recordings, because the model's tensors were replaced. Called between two steps."""
        if self._steps is not None:
            self._steps.clear()
            self._memory = _Memory()

    def replay(self, plan: StepPlan) -> Tensor | None:
        """Run a step's forward pass from its recording, in inference mode. A step without a recording is recorded.

        Returns: hidden states [T, hidden], valid until the next replay. None if the model must run the step: the step
            has prefill, an adapter, page copies or too many tokens, a state that another row writes in this step, or
            recording steps of this kind has failed.
        """
        size = plan.num_tokens
        if self._steps is None or size > len(self._positions) or plan.num_prefill_tokens:
            return None
        if plan.copies is not None or plan.adapter_slots is not None:
            return None
        if plan.num_drafts is not None and not self._records_drafts:
            return None
        if plan.state is not None and plan.state.num_decodes != size:
            return None
        batch = self._batches.build(plan)
        if plan.state is not None:
            batch = replace(batch, state=self._state_inputs.filled(plan.state))
        self._attention.prepare(batch)
        input_ids, positions = self._inputs(size)
        input_ids.copy_(batch.input_ids)
        positions.copy_(batch.positions)
        key = (size, plan.num_drafts is None, torch.get_num_threads())
        step = self._steps.get(key)
        try:
            if step is None:
                fixed = replace(batch, input_ids=input_ids, positions=positions)
                step = self._steps[key] = self._restoring(fixed, lambda: self._recorded(fixed))
            elif not step.is_checked:
                unchecked = step
                return self._restoring(batch, lambda: self._checked(unchecked, batch))
            else:
                step.recording.repeat()
                self.num_replays += 1
        except OtherResultError:
            return None  # the model then runs the step, and raises the actual error
        except GraphCaptureError as error:
            if plan.num_drafts is not None:
                self._records_drafts = False
                _logger.info("steps with drafts are not recorded: %s", error)
                return None
            self._steps = None
            self._memory = _Memory()
            _logger.info("steps are not recorded: %s", error)
            return None
        return step.hidden

    def _inputs(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the tensors from which recorded calls of a batch size read token ids and positions."""
        found = self._inputs_by_size.get(size)
        if found is None:
            found = self._inputs_by_size[size] = self._input_ids[:size], self._positions[:size]
        return found

    def _restoring(self, batch: ForwardBatch, run: Callable[[], _T]) -> _T:
        """Call a function that runs a step. If it fails, restore the step's states, because the model runs it again."""
        restore = self._state_inputs.restorer(batch.state)
        try:
            return run()
        except (GraphCaptureError, OtherResultError):
            restore()
            raise

    def _recorded(self, batch: ForwardBatch) -> "_RecordedStep":
        found: list[Tensor] = []
        recording = record(lambda: found.append(self._forward(_TokensOnly.of(batch))), self._memory)
        hidden = self._memory.borrowed(found.pop())
        if not self._memory.is_free:
            gc.collect()
            if not self._memory.is_free:  # later steps would overwrite tensors that are still in use
                raise GraphCaptureError("the model keeps tensors that it computed")
        return _RecordedStep(recording, hidden)

    def _checked(self, step: "_RecordedStep", batch: ForwardBatch) -> Tensor:
        """Run a step by the model and then by the recording, compare the results, and return the model's result."""
        restore = self._state_inputs.restorer(batch.state)
        expected = self._forward(batch)
        if expected.isnan().any():
            return expected  # NaN may also come from memory that the recording did not write: check a later step
        restore()
        self._memory.fill_nan()
        step.recording.repeat()
        if not torch.equal(expected, step.hidden):
            raise GraphCaptureError(
                "replayed calls gave other hidden states than the model: not all calls were recorded"
            )
        step.is_checked = True
        return expected


@dataclass(slots=True)
class _RecordedStep:
    recording: Recording
    hidden: Tensor
    is_checked: bool = False
