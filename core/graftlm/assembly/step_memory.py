"""Measures the memory that steps need in addition to weights, keys and values, by running the largest steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import (
    AttentionBackend,
    AttentionLayer,
    DraftHead,
    ForwardBatch,
    Model,
    StateBatch,
    StateSegments,
)
from graftlm.errors import InvariantError
from graftlm.execution.batch import to_device
from graftlm.execution.hidden_capture import HiddenCapture
from graftlm.execution.kv_store import KVStore
from graftlm.execution.sampling_filters import keep_min_p, keep_top_k, keep_top_p
from graftlm.execution.state_store import StateStore

__all__ = ["CudaMeter", "LargestSteps", "MemoryMeter", "StepMemory", "measure_steps", "meter_for"]

#: Memory that the driver uses for a graph of a few hundred kernels, in addition to the kernels' own memory.
_GRAPH_BYTES: Final = 8 << 20
#: Number of copies of the page tables: the graphs' table, the step's table and the backend's list.
_TABLE_COPIES: Final = 3


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory that steps need in addition to weights, keys and values.

    Attributes:
        activation_bytes: size of the largest step's activations.
        graph_bytes: size of the CUDA graphs, including the memory in which their kernels compute.
    """

    activation_bytes: int = 0
    graph_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The sum of `activation_bytes` and `graph_bytes`."""
        return self.activation_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The largest sizes of an engine's steps.

    Attributes:
        num_rows: maximum number of requests in a step, all of which may sample.
        prefill_tokens: maximum number of prompt tokens in a step.
        context_len: maximum number of tokens of a request.
        page_size: number of tokens in a page.
        graph_sizes: numbers of requests for which a step is captured; empty without graphs.
        num_drafted: maximum number of drafted tokens in a step; a token is also sampled after each of them.
    """

    num_rows: int
    prefill_tokens: int
    context_len: int
    page_size: int
    graph_sizes: tuple[int, ...]
    num_drafted: int = 0

    def prompt_lens(self) -> list[int]:
        """Return the number of tokens of each request in the largest step, in ascending order."""
        num_tokens = self.prefill_tokens + self.num_rows
        whole, rest = divmod(num_tokens, self.context_len)
        return [rest] * (rest > 0) + [self.context_len] * whole


class MemoryMeter(Protocol):
    """Measures how much of a device's memory a function uses."""

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """Call a function. Return the peak of the allocated bytes, minus the bytes that were allocated before."""
        ...


class CudaMeter:
    """Measures with PyTorch's memory counters of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """Call a function, wait until the device has finished, and return the peak; see `MemoryMeter.peak_bytes`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        function()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def meter_for(device: torch.device) -> MemoryMeter | None:
    """Return a meter for a device. None for a CPU, because other programs use the host's memory at the same time."""
    return CudaMeter(device) if device.type == "cuda" else None


def measure_steps(
    steps: LargestSteps,
    model: Model,
    layers: Sequence[AttentionLayer],
    make_attention: Callable[[KVStore], AttentionBackend],
    dtype: torch.dtype,
    device: torch.device,
    meter: MemoryMeter,
    head: DraftHead | None = None,
) -> StepMemory:
    """Run the largest step and the largest captured step on a temporary KV memory, and measure the memory they need.

    The steps also compile kernels and load libraries, so that the memory of these is not counted as free afterwards.

    Args:
        model: the model; the values of its weights do not matter.
        layers: all attention layers, including that of a draft head.
        make_attention: function that creates the attention backend for a KV memory.
        dtype: dtype of the temporary KV memory.
        meter: measures the device's memory.
        head: the draft head, whose keys each step computes; None: no head.

    Effects: the model must be bound to another backend, and to other states, before it runs again.
    """
    prompt_lens = steps.prompt_lens()
    most_requests = max((*steps.graph_sizes, len(prompt_lens)))
    num_pages = sum(-(-length // steps.page_size) for length in prompt_lens) + most_requests
    attention = _TemporaryAttention(make_attention(KVStore(layers, num_pages, steps.page_size, dtype, device)))
    model.bind_attention(attention)
    if model.state_layers:
        model.bind_states(StateStore(model.state_layers, 1 + most_requests, device).tensors)
    try:
        with torch.inference_mode():
            return _measure(steps, prompt_lens, model, attention, device, meter, head)
    finally:
        attention.release()
        if model.state_layers:
            model.bind_states([() for _ in model.state_layers])  # frees the temporary states


def _measure(
    steps: LargestSteps,
    prompt_lens: list[int],
    model: Model,
    attention: AttentionBackend,
    device: torch.device,
    meter: MemoryMeter,
    head: DraftHead | None,
) -> StepMemory:
    capture = HiddenCapture(model, () if head is None else head.hidden_layers)

    def forward(query_lens: list[int]) -> Tensor:
        batch = _batch(query_lens, steps.page_size, device)
        attention.prepare(batch)
        return capture.forward(batch)

    def step() -> None:
        states = forward(prompt_lens)
        sampled = torch.arange(steps.num_rows + steps.num_drafted, device=device) % len(states)
        _sample(model.logits(capture.final(states)[sampled]))
        if head is not None:
            tokens = torch.zeros(len(states), dtype=torch.int64, device=device)
            head.keys_and_values(head.features(states), tokens, tokens)

    activation_bytes = meter.peak_bytes(step)
    if not steps.graph_sizes:
        return StepMemory(activation_bytes)
    largest = max(steps.graph_sizes)
    max_pages = -(-steps.context_len // steps.page_size)
    table_bytes = _TABLE_COPIES * largest * max_pages * np.dtype(np.int32).itemsize
    captured_bytes = meter.peak_bytes(lambda: forward([1] * largest))
    return StepMemory(activation_bytes, captured_bytes + table_bytes + len(steps.graph_sizes) * _GRAPH_BYTES)


def _sample(logits: Tensor) -> Tensor:
    """Sample with every filter enabled for every row, because this needs the most memory."""
    n = len(logits)
    probs = torch.softmax(keep_top_k(logits.float(), np.full(n, 50)), dim=1)
    return keep_min_p(keep_top_p(probs, np.full(n, 0.9)), np.full(n, 0.1))


class _TemporaryAttention(AttentionBackend):
    """A wrapper of a backend that can release the backend's memory while the model still refers to the wrapper."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend: AttentionBackend | None = backend

    def release(self) -> None:
        self._backend = None

    def prepare(self, batch: ForwardBatch) -> None:
        self._current().prepare(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        return self._current().forward(q, k, v, layer)

    def _current(self) -> AttentionBackend:
        if self._backend is None:
            raise InvariantError("a model ran with the attention backend of a measurement that has ended")
        return self._backend


def _batch(query_lens: list[int], page_size: int, device: torch.device) -> ForwardBatch:
    """Return a batch of requests without computed tokens, each with its own pages."""
    lens = np.array(query_lens, dtype=np.int32)
    num_pages = -(-lens // page_size)
    starts = np.cumsum(num_pages) - num_pages
    table = (starts[:, None] + np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1)).astype(np.int32)
    ends = np.cumsum(lens, dtype=np.int64)
    positions = np.arange(ends[-1]) - np.repeat(ends - lens, lens)
    cu_seqlens_q = np.concatenate([[0], ends]).astype(np.int32)
    return ForwardBatch(
        input_ids=torch.zeros(int(ends[-1]), dtype=torch.int64, device=device),
        positions=to_device(positions, device),
        out_slots=to_device(np.repeat(starts * page_size, lens) + positions, device),
        cu_seqlens_q=to_device(cu_seqlens_q, device),
        seq_lens=to_device(lens, device),
        page_table=to_device(table, device),
        logits_idx=to_device(ends - 1, device),
        num_decodes=int((lens == 1).sum()),
        query_lens_cpu=lens,
        seq_lens_cpu=lens,
        page_table_cpu=table,
        state=_states(lens, device),
    )


def _states(lens: NDArray[np.int32], device: torch.device) -> StateBatch:
    """Return one segment per request, from the initial state to the request's own slot."""
    slots = np.arange(1, len(lens) + 1, dtype=np.int32)
    starts = (np.cumsum(lens) - lens).astype(np.int32)
    segments = StateSegments(starts, lens, np.zeros_like(slots), slots, num_decodes=int((lens == 1).sum()))
    sources, targets = (to_device(column.astype(np.int64), device) for column in (segments.sources, slots))
    return StateBatch(segments, sources, targets)
