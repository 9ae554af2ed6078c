"""Steps on a CPU without the Python between kernels: recorded once for a number of requests, then repeated."""

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

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
    """Memory of the tensors of recordings: it stays, and takes another tensor once one is gone.

    Recordings that never run at the same time share it, as graphs share a pool: a step leaves nothing there but its
    hidden states.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, NDArray[np.uint8]] = {}  # by address
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # addresses by capacity
        self._taken: list[tuple[StorageWeakRef, int]] = []

    @property
    def is_free(self) -> bool:
        """Whether all tensors that it has given are gone."""
        self._collect()
        return not self._taken

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor of the same size, strides and dtype."""
        at = self._take(tensor.untyped_storage().nbytes())
        made = self._over(self.blocks[at], tensor)
        self._taken.append((StorageWeakRef(made.untyped_storage()), at))  # type: ignore[no-untyped-call]
        return made

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep it from being taken; others as they are."""
        block = self.blocks.get(_address(tensor) or 0)
        return tensor if block is None else self._over(block, tensor)

    def fill_nan(self) -> None:
        """Overwrite everything with bytes that are NaN in any floating dtype."""
        for block in self.blocks.values():
            block.fill(0xFF)

    @staticmethod
    def _over(block: NDArray[np.uint8], tensor: Tensor) -> Tensor:
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _take(self, num_bytes: int) -> int:
        self._collect()
        capacity = 1 << (max(num_bytes, _LINE) - 1).bit_length()  # so that steps of other sizes can use it, too
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


class _OtherResultError(Exception):
    """A kernel returned something else than when it was recorded, such as that it found no memory."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears what a function has computed: kernels' calls and PyTorch's operations, in their order.

    Args:
        memory: of the tensors that the function makes.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.memory = memory
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
        made = _tensors_of(out)
        if made is None:
            raise GraphCaptureError(f"{func} takes a value out of a tensor")
        if any(tensor.layout is not torch.strided for tensor in made):
            raise GraphCaptureError(f"{func} gives tensors whose memory is not plain")
        # What an operation returns of the memory that it was given, it has not computed: a view, or what it changed.
        given = {_address(arg) for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)}
        kept = [tensor if _address(tensor) in given else self.memory.like(tensor).copy_(tensor) for tensor in made]
        # Recorded calls only borrow, so that others take the memory of what the function lets go.
        args, kwargs = tree_map_only(Tensor, self.memory.borrowed, (args, kwargs))
        if any(ours is not theirs for ours, theirs in zip(kept, made, strict=True)):
            self.calls.append(
                (_repeat_into, ([self.memory.borrowed(tensor) for tensor in kept], func, args, kwargs), {})
            )
        elif func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
        # Addresses of these may be among a kernel's arguments, which keep nothing.
        self._kept += [tensor for tensor in kept if self.memory.borrowed(tensor) is tensor]
        if out is None:
            return None
        return kept[0] if isinstance(out, Tensor) else type(out)(kept)

    def heard(self, function: Callable[..., Any], arguments: tuple[Any, ...], result: object) -> None:
        """Note a kernel's call."""
        if result is None:
            self.calls.append((function, arguments, {}))
        else:
            self.calls.append((_repeat_with_result, (result, function, arguments), {}))

    def repeat(self) -> None:
        """Compute again, on the same tensors.

        Raises:
            _OtherResultError: a kernel returned something else.
        """
        for function, arguments, options in self.calls:
            function(*arguments, **options)


def record(function: Callable[[], None], memory: _Memory | None = None) -> Recording:
    """Run a function, and return what repeats its work.

    Args:
        memory: of the tensors that it makes, shared by recordings of which one runs at a time; None: its own.

    Raises:
        GraphCaptureError: it does what cannot be repeated, as far as can be seen, or fails.
    """
    recording = Recording(_Memory() if memory is None else memory)
    try:
        with recording, heard_by(recording.heard):
            function()
    except GraphCaptureError:
        raise
    except Exception as error:  # which may come from being heard: without that, the model may do well
        raise GraphCaptureError(f"it fails while it is recorded: {error!r}") from error
    return recording


def _tensors_of(out: object) -> Sequence[Tensor] | None:
    """Return the tensors that an operation has returned; None if it has returned something else."""
    made = [] if out is None else [out] if isinstance(out, Tensor) else out
    if isinstance(made, list | tuple) and all(isinstance(tensor, Tensor) for tensor in made):
        return made
    return None


def _address(tensor: Tensor) -> int | None:
    """Return where a tensor's storage begins; None where it has none, as in oneDNN's layouts."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _repeat_into(kept: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    out = func(*args, **kwargs)
    for tensor, again in zip(kept, [out] if isinstance(out, Tensor) else out, strict=True):
        tensor.copy_(again)


def _repeat_with_result(result: object, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if function(*arguments) != result:
        raise _OtherResultError


class _TokensOnly(ForwardBatch):
    """A batch as a model may see it whose calls are repeated: what all batches of as many one-token requests share."""

    __slots__ = ()

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Return a batch with the same fields, of which some cannot be read."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)})

    def __getattribute__(self, name: str) -> Any:
        if name in _OTHER_EACH_STEP:
            raise GraphCaptureError(
                f"the model reads the batch's {name}, which the recorded calls would not read again"
            )
        return super().__getattribute__(name)

    @property
    def num_requests(self) -> int:
        """B, of one token each."""
        return self.num_tokens


_OTHER_EACH_STEP: Final = frozenset(field.name for field in fields(ForwardBatch)) - {
    "input_ids",
    "positions",
    "num_decodes",
    "in_graph",
    "wanted_idx",  # None: all tokens are
}


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
        self._batches = BatchBuilder(self.last_tokens)
        self._attention = attention
        self._forward = forward
        self._input_ids, self._positions = torch.zeros(2, max_size, dtype=torch.int64)
        self._inputs_by_size: dict[int, tuple[Tensor, Tensor]] = {}  # their beginnings
        #: By the number of requests, and of threads.
        self._steps: dict[tuple[int, int], _RecordedStep] | None = {}
        self._memory = _Memory()

    @property
    def holds_packed(self) -> bool:
        """Always: kernels' arguments are addresses."""
        return True

    def recapture(self) -> None:
        """Forget what has been recorded, since the model computes with other tensors than before. Between two steps."""
        if self._steps is not None:
            self._steps.clear()
            self._memory = _Memory()

    def replay(self, plan: StepPlan) -> Tensor | None:
        """Run a step's forward pass, in inference mode.

        Returns: hidden states [T, hidden], valid until the next replay; None if steps like this one are not recorded: a
            request brings more than one token or has an adapter, there are too many, or pages arrive from host memory
            layer by layer.
        """
        size = plan.num_tokens
        if self._steps is None or size != plan.num_decodes or size > len(self._positions):
            return None
        if plan.copies is not None or plan.adapter_slots is not None:
            return None
        batch = self._batches.build(plan)
        self._attention.prepare(batch)
        input_ids, positions = self._inputs(size)
        input_ids.copy_(batch.input_ids)
        positions.copy_(batch.positions)
        key = (size, torch.get_num_threads())
        step = self._steps.get(key)
        try:
            if step is None:
                step = self._steps[key] = self._recorded(replace(batch, input_ids=input_ids, positions=positions))
            elif not step.is_checked:
                return self._checked(step, batch)
            else:
                step.recording.repeat()
                self.num_replays += 1
        except _OtherResultError:
            return None  # the model runs into it, and says what it is
        except GraphCaptureError as error:
            self._steps = None
            self._memory = _Memory()
            _logger.info("steps are not recorded: %s", error)
            return None
        return step.hidden

    def _inputs(self, size: int) -> tuple[Tensor, Tensor]:
        """Return where recorded calls of so many requests find what a model reads of a batch: tokens and positions."""
        found = self._inputs_by_size.get(size)
        if found is None:
            found = self._inputs_by_size[size] = self._input_ids[:size], self._positions[:size]
        return found

    def _recorded(self, batch: ForwardBatch) -> "_RecordedStep":
        found: list[Tensor] = []
        recording = record(lambda: found.append(self._forward(_TokensOnly.of(batch))), self._memory)
        hidden = self._memory.borrowed(found.pop())
        if not self._memory.is_free:
            gc.collect()
            if not self._memory.is_free:  # by the time it is read again, another step has written there
                raise GraphCaptureError("the model keeps tensors that it computed")
        return _RecordedStep(recording, hidden)

    def _checked(self, step: "_RecordedStep", batch: ForwardBatch) -> Tensor:
        """Run a step twice, and return what the model made of it."""
        expected = self._forward(batch)
        if expected.isnan().any():
            return expected  # overwritten memory is NaN too: check a later step
        self._memory.fill_nan()
        step.recording.repeat()
        if not torch.equal(expected, step.hidden):
            raise GraphCaptureError("repeated calls gave other hidden states than the model: not all were heard")
        step.is_checked = True
        return expected


@dataclass(slots=True)
class _RecordedStep:
    recording: Recording
    hidden: Tensor
    is_checked: bool = False
