"""Copies KV blocks between paged tensors and host memory during the forward pass."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.execution.batch import to_device
from graftlm.execution.kv_store import KVStore
from graftlm.execution.streams import DeviceStream, DeviceStreams, streams_of

__all__ = ["BlockMover"]


class BlockMover:
    """Runs the copies of one step at a time. Only the step thread calls it.

    For each layer, a block in host memory contains the keys of its tokens and then their values. If values are a prefix
    of the keys, it contains no values. If the dtype has scales, the scales of both follow:

        slot 0 | keys of layer 0 | values of layer 0 | keys of layer 1 | ...
        slot 1 | ...

    Early copies run before the step. The loads, layer by layer, and the stores run in parallel with the step: on a CPU
    in a separate thread, on CUDA in a separate stream. `await_layer` waits until a layer's loads are done; its
    attention can then begin.

    Args:
        kv: the paged tensors.
        device: device of these tensors.
        streams: streams of the device; None: torch's streams on a GPU, no streams on a CPU.
    """

    def __init__(self, kv: KVStore, device: torch.device, streams: DeviceStreams | None = None) -> None:
        self._kv = kv
        self._device = device
        self._layers: list[tuple[Tensor, ...]] = []  # host keys and values, [num_blocks, P, page_size, H_kv, D]
        self._arrivals: _Arrivals = _NOTHING
        self._streams = streams_of(device) if streams is None else streams
        self._thread = ThreadPoolExecutor(1, "graftlm-copy") if self._streams is None else None
        self._stream = None if self._streams is None else self._streams.stream()

    def allocate(self, num_blocks: int, pages_per_block: int) -> NDArray[np.uint8]:
        """Allocate host memory; see `KVTransfer.allocate`. No copy may be running."""
        kv = self._kv
        block_bytes = pages_per_block * kv.page_bytes
        pinned = self._device.type == "cuda"
        self._layers = []  # frees the previous memory first, if it has no other references
        memory = torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._layers = list(_layer_views(memory, kv, pages_per_block))
        array: NDArray[np.uint8] = memory.numpy()
        return array

    def free(self) -> None:
        """Drop this object's reference to the host memory. No copy may be running."""
        self._layers = []

    def copy(self, copies: StepCopies) -> None:
        """Run copies and wait for them."""
        with self.overlapped(copies):
            pass

    @contextmanager
    def overlapped(self, copies: StepCopies) -> Iterator[None]:
        """Run a step's copies in parallel with the body of the context; all copies are done when the context ends."""
        if self._streams is not None and self._stream is not None:
            with self._overlapped_on_stream(copies, self._streams, self._stream):
                yield
            return
        assert self._thread is not None, "on the CPU there is a copy thread"
        self._early(copies)
        arrivals = _ThreadArrivals(len(self._layers))
        running: Future[None] = self._thread.submit(self._late, copies, arrivals)
        self._arrivals = arrivals
        try:
            yield
        finally:
            self._arrivals = _NOTHING
            running.result()  # raises if a copy failed, because the step then has wrong keys and values

    def await_layer(self, layer_id: int) -> None:
        """Wait until a layer's loads of the current step are done; on CUDA, the current stream waits."""
        self._arrivals.wait(layer_id)

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    @contextmanager
    def _overlapped_on_stream(self, copies: StepCopies, streams: DeviceStreams, stream: DeviceStream) -> Iterator[None]:
        self._early(copies)
        stream.wait_stream(streams.current())
        arrivals = _StreamArrivals(len(self._layers), streams)
        with streams.use(stream):
            self._late(copies, arrivals)
        self._arrivals = arrivals
        try:
            yield
        finally:
            self._arrivals = _NOTHING
            # Wait, because the next step may overwrite the sources of these copies, and the host reads their targets.
            streams.current().wait_stream(stream)
            stream.synchronize()

    def _early(self, copies: StepCopies) -> None:
        for layer_id in range(len(self._layers)) if copies.early_stores or copies.early_loads else ():
            self._store(copies.early_stores, layer_id)
            self._load(copies.early_loads, layer_id)

    def _late(self, copies: StepCopies, arrivals: "_ThreadArrivals | _StreamArrivals") -> None:
        try:
            for layer_id in range(len(self._layers)):
                self._load(copies.loads, layer_id)
                arrivals.arrive(layer_id)
            for layer_id in range(len(self._layers)) if copies.stores else ():
                self._store(copies.stores, layer_id)
        finally:
            arrivals.end()

    @torch.inference_mode()
    def _store(self, copies: Sequence[BlockCopy], layer_id: int) -> None:
        for pages, device_side, host_side in self._pairs(copies, layer_id):
            host_side.copy_(device_side.index_select(0, pages), non_blocking=True)

    @torch.inference_mode()
    def _load(self, copies: Sequence[BlockCopy], layer_id: int) -> None:
        for pages, device_side, host_side in self._pairs(copies, layer_id):
            device_side.index_copy_(0, pages, host_side.to(self._device, non_blocking=True))

    def _pairs(self, copies: Sequence[BlockCopy], layer_id: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (page ids, device tensor, part of a block in host memory) for keys, then for values."""
        device_sides = self._kv.stored(layer_id)
        for copy in copies:
            pages = to_device(copy.pages.astype(np.int64), self._device)
            part = slice(copy.first_page, copy.first_page + len(copy.pages))
            for device_side, host_side in zip(device_sides, self._layers[layer_id], strict=True):
                yield pages, device_side, host_side[copy.slot, part]


class _Arrivals:
    """The state without running loads."""

    def wait(self, layer_id: int) -> None:
        """Return immediately."""


_NOTHING = _Arrivals()


class _ThreadArrivals(_Arrivals):
    """Lets the step thread wait for layers that the copy thread loads."""

    def __init__(self, num_layers: int) -> None:
        self._events = [threading.Event() for _ in range(num_layers)]

    def wait(self, layer_id: int) -> None:
        self._events[layer_id].wait()

    def arrive(self, layer_id: int) -> None:
        self._events[layer_id].set()

    def end(self) -> None:
        """Wake all waiting threads, also after an error; the code that waits for the copies raises the error."""
        for event in self._events:
            event.set()


class _StreamArrivals(_Arrivals):
    """Lets the step's stream wait for layers that the copy stream loads."""

    def __init__(self, num_layers: int, streams: DeviceStreams) -> None:
        self._events = [streams.event() for _ in range(num_layers)]

    def wait(self, layer_id: int) -> None:
        self._events[layer_id].wait()

    def arrive(self, layer_id: int) -> None:
        self._events[layer_id].record()

    def end(self) -> None:
        """Do nothing: a wait for an event that was not recorded returns immediately."""


def _layer_views(memory: Tensor, kv: KVStore, pages_per_block: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of each layer's tensors in host memory, [num_blocks, P, page_size, H_kv, D] each."""
    start = 0  # offset in bytes
    for layer_id in range(kv.num_layers):
        views = []
        for tensor in kv.stored(layer_id):
            size = pages_per_block * tensor[0].nbytes
            part = memory[:, start : start + size].view(tensor.dtype)
            views.append(part.view(len(memory), pages_per_block, *tensor.shape[1:]))
            start += size
        yield tuple(views)
