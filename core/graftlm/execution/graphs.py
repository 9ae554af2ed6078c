"""CUDA graphs of steps without prefill. They are captured for some batch sizes; a step is padded to the next one."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, ForwardBatch
from graftlm.errors import GraphCaptureError
from graftlm.execution.decode_inputs import DecodeInputs
from graftlm.plan import StepPlan

__all__ = ["CudaCapture", "DecodeGraphs", "EagerCapture", "GraphCapture", "HeldGraphs", "ReplayedSteps", "graph_sizes"]

#: The first batch sizes. Above 8, sizes increase by 8 or by an eighth, so padding adds at most an eighth to a large
#: batch.
_FIRST_SIZES = (1, 2, 4, 8)
#: Largest batch size that is captured by default. In larger batches, kernels take longer than their launches.
_MAX_SIZE = 512


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes to capture for at most `max_requests` running requests: 1, 2, 4, 8, 16, 24, 32, ..."""
    largest = min(max_requests, _MAX_SIZE)
    sizes = [size for size in _FIRST_SIZES if size < largest]
    size = 16
    while size < largest:
        sizes.append(size)
        size += max(8, size // 64 * 8)
    return (*sizes, largest)


class ReplayedSteps(Protocol):
    """Replays a model's forward pass without its Python code: graphs on a GPU, or recordings on a CPU."""

    #: int64 [R], each row's latest sampled token; written by the sampler.
    last_tokens: Tensor
    #: Number of replayed steps.
    num_replays: int

    @property
    def uses_packed_weights(self) -> bool:
        """Whether replays read packed weights, whose addresses change each time weights are packed."""
        ...

    def replay(self, plan: StepPlan) -> Tensor | None:
        """Return a step's hidden states [T, hidden], valid until the next replay; None if it cannot be replayed."""
        ...

    def recapture(self) -> None:
        """Drop all captures, because the model's tensors were replaced. Called between two steps."""
        ...


class HeldGraphs:
    """Captures steps again when the model's tensors were replaced, but not while memory is released.

    Args:
        graphs: the replayed steps; None if there are none.
    """

    def __init__(self, graphs: ReplayedSteps | None = None) -> None:
        self._graphs = graphs
        self._num_holds = 0
        self._is_stale = False

    @property
    def uses_packed_weights(self) -> bool:
        """Whether replays read packed weights."""
        return self._graphs is not None and self._graphs.uses_packed_weights

    def recapture(self) -> None:
        """Capture the steps again, or do so at the end of the last hold."""
        if self._num_holds:
            self._is_stale = True
        elif self._graphs is not None:
            self._graphs.recapture()

    def hold(self) -> None:
        """Capture nothing until `unhold`, because memory that steps read is released."""
        self._num_holds += 1

    def unhold(self) -> None:
        """End one `hold`."""
        self._num_holds -= 1
        if not self._num_holds and self._is_stale:
            self._is_stale = False
            self.recapture()


class GraphCapture(Protocol):
    """Captures functions as graphs."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function at least once; return a function that repeats its device work on the same tensors.

        Raises:
            GraphCaptureError: the function does something that a graph cannot repeat.
        """
        ...


class EagerCapture:
    """Calls the function again instead of a graph, so that the code around graphs can be tested on a CPU."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function, and return it."""
        function()
        return function


class CudaCapture:
    """Captures CUDA graphs in a separate stream. The graphs share one memory pool, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function once, so that kernels are compiled and selected, then capture it."""
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
    """Replays a model's forward pass for steps without prefill, up to the largest captured number of tokens.

    A step that verifies drafts is replayed as if each of its tokens were a request; see `DecodeInputs`.

    A step's inputs are padded to the next captured size and copied to the tensors that the graph reads; then the graph
    is replayed. Before every replay, the attention backend is prepared with a batch in these tensors.

    Args:
        inputs: the tensors that the graphs read.
        sizes: batch sizes to capture, in requests or tokens; at most the largest batch of `inputs`.
        attention: the backend that `forward` calls.
        forward: the model's forward pass.
        capture: captures the graphs.
        on_size: function that is called with each size before its capture. The largest size is captured first, so that
            the other sizes fit in its memory.

    Attributes:
        last_tokens: int64 [R], each row's latest sampled token; written by the sampler.
        num_replays: number of replayed steps.

    Raises:
        GraphCaptureError: the model or the backend does something that a graph cannot repeat.
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
    def uses_packed_weights(self) -> bool:
        """Always False, because weights are packed only on a CPU, where no graph is captured."""
        return False

    @torch.inference_mode()
    def recapture(self) -> None:
        """Capture all sizes again, because the model's tensors were replaced. Called between two steps."""
        self._replays.clear()  # frees their memory for the new graphs
        for size in reversed(self._sizes):
            self._replays[size] = self._captured(size)

    @torch.inference_mode()
    def replay(self, plan: StepPlan) -> Tensor | None:
        """Run a step's forward pass.

        Returns: hidden states [T, hidden], valid until the next replay. None if no graph can run this step: it has
            prefill, too many tokens, an adapter or page copies, or verifies drafts with media.
        """
        if plan.num_prefill_tokens or plan.num_tokens > self._sizes[-1]:
            return None
        if plan.num_drafts is not None and (plan.state is not None or plan.rope_positions is not None):
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
