"""Steps of one-token requests as graphs: captured once for a few batch sizes, replayed for every size below."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, ForwardBatch
from graftlm.errors import GraphCaptureError
from graftlm.execution.decode_inputs import DecodeInputs
from graftlm.plan import StepPlan

__all__ = ["CudaCapture", "DecodeGraphs", "EagerCapture", "GraphCapture", "ReplayedSteps", "graph_sizes"]

#: Sizes up to 8, then steps of 8 or an eighth, so that a batch is padded by an eighth at most.
_FIRST_SIZES = (1, 2, 4, 8)
#: No batch above this size is captured unasked: the device's work then outlasts the launching of it.
_MAX_SIZE = 512


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes to capture for an engine that runs that many requests: 1, 2, 4, 8, 16, 24, 32, ..."""
    largest = min(max_requests, _MAX_SIZE)
    sizes = [size for size in _FIRST_SIZES if size < largest]
    size = 16
    while size < largest:
        sizes.append(size)
        size += max(8, size // 64 * 8)
    return (*sizes, largest)


class ReplayedSteps(Protocol):
    """Runs a model's forward pass without its Python: graphs on a GPU, recordings on a CPU."""

    #: int64 [R], each row's latest sampled token; whoever samples writes it.
    last_tokens: Tensor
    #: Steps that have been replayed.
    num_replays: int

    @property
    def holds_packed(self) -> bool:
        """Whether it computes with packed weights, which are elsewhere each time that they have been packed."""
        ...

    def replay(self, plan: StepPlan) -> Tensor | None:
        """Return a step's hidden states [T, hidden], valid until the next replay; None if it cannot run this step."""
        ...

    def recapture(self) -> None:
        """Start anew, since the model computes with other tensors than before. Between two steps."""
        ...


class GraphCapture(Protocol):
    """Makes graphs out of functions."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function at least once, and return what repeats its work on the device, on the same tensors.

        Raises:
            GraphCaptureError: the function does what a graph cannot repeat.
        """
        ...


class EagerCapture:
    """Repeats a function's work by calling it again: for tests, on a CPU, of all that surrounds a graph."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function, and return it."""
        function()
        return function


class CudaCapture:
    """Captures CUDA graphs in a stream of its own. All share one pool of memory: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function once, so that kernels are compiled and chosen, then capture it."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                function()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
        except RuntimeError as error:
            raise GraphCaptureError(
                f"a step cannot be captured in a CUDA graph: {error}. Set execution.graphs: false."
            ) from error
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeGraphs:
    """Runs a model's forward pass for steps in which every request brings one token, and there are not too many.

    A step is padded to the next captured size, copied into the tensors that the graphs read, and replayed. The backend
    is prepared before every replay, with a batch in the tensors that were captured.

    Args:
        inputs: what the graphs read; no larger batch is ever asked of it.
        sizes: requests of the batches to capture; the largest is at most what `inputs` holds.
        attention: the backend that `forward` calls.
        forward: the model's.
        capture: makes the graphs.
        on_size: hears of every size before it is captured; the largest comes first, so that others fit its memory.

    Attributes:
        last_tokens: int64 [R], each row's latest sampled token; whoever samples writes it.
        num_replays: steps that have been replayed.

    Raises:
        GraphCaptureError: the model or the backend does what a graph cannot repeat.
    """

    @torch.inference_mode()
    def __init__(
        self,
        inputs: DecodeInputs,
        sizes: Sequence[int],
        attention: AttentionBackend,
        forward: Callable[[ForwardBatch], Tensor],
        capture: GraphCapture,
        on_size: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.last_tokens = inputs.last_tokens
        self.num_replays = 0
        self._inputs = inputs
        self._capture = capture
        self._attention = attention
        self._forward = forward
        self._sizes = sorted(set(sizes))
        self._hidden = torch.empty_like(self._padding_only(self._sizes[-1]))
        self._replays: dict[int, Callable[[], None]] = {}
        for size in reversed(self._sizes):
            on_size(size)
            self._replays[size] = self._captured(size)

    @property
    def holds_packed(self) -> bool:
        """Never: weights are packed on a CPU only, where nothing is captured."""
        return False

    @torch.inference_mode()
    def recapture(self) -> None:
        """Capture every size anew, since the model computes with other tensors than before. Between two steps."""
        self._replays.clear()  # their memory is for the new ones
        for size in reversed(self._sizes):
            self._replays[size] = self._captured(size)

    @torch.inference_mode()
    def replay(self, plan: StepPlan) -> Tensor | None:
        """Run a step's forward pass.

        Returns: hidden states [T, hidden], valid until the next replay; None if no graph serves this step: a request
            brings more than one token or has an adapter, there are too many, or pages arrive from host memory layer
            by layer.
        """
        if plan.num_tokens != plan.num_decodes or plan.num_tokens > self._sizes[-1]:
            return None
        if plan.copies is not None or plan.adapter_slots is not None:
            return None
        size = self._sizes[bisect_left(self._sizes, plan.num_tokens)]
        self._attention.prepare(self._inputs.fill(plan, size))
        self._replays[size]()
        self.num_replays += 1
        return self._hidden[: plan.num_tokens]

    def _padding_only(self, size: int) -> Tensor:
        batch = self._inputs.fill(None, size)
        self._inputs.gather(size)
        self._attention.prepare(batch)
        return self._forward(batch)

    def _captured(self, size: int) -> Callable[[], None]:
        batch = self._inputs.fill(None, size)
        self._attention.prepare(batch)

        def step() -> None:
            self._inputs.gather(size)
            self._hidden[:size].copy_(self._forward(batch))

        return self._capture.capture(step)
