"""Asynchronous copies of results from the device to the host."""

import time
from typing import Protocol

import torch
from torch import Tensor

from graftlm.execution.streams import DeviceStreams

__all__ = ["CudaReadback", "HostReadback", "Readback", "readback_from"]


class Readback(Protocol):
    """Copies tensors to the host, and measures the device time from its creation to `close`."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Start the copy of a tensor. Returns: a host tensor, which is filled when `wait` has returned."""
        ...

    def close(self) -> None:
        """Mark the end of the copies."""
        ...

    def wait(self) -> float:
        """Wait for the copies. Returns: device time in seconds, without work that was launched before the creation."""
        ...


class HostReadback:
    """The readback for a CPU, whose results are already in host memory."""

    def __init__(self) -> None:
        self._start_s = self._end_s = time.perf_counter()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def close(self) -> None:
        """Stop the clock."""
        self._end_s = time.perf_counter()

    def wait(self) -> float:
        """Return the time in seconds from the creation to `close`."""
        return self._end_s - self._start_s


class CudaReadback:
    """Copies to pinned memory in the current stream, with an event after the last copy.

    `wait` sleeps instead of spinning, and releases the GIL. With overlap, the next step is planned at the same time.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._start = streams.event(timed=True)
        self._end = streams.event(timed=True)
        self._start.record()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Launch a copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Record the event after the copies."""
        self._end.record()

    def wait(self) -> float:
        """Wait for the last event. Returns: device time in seconds between the two events."""
        self._end.synchronize()
        return 1e-3 * float(self._start.elapsed_time(self._end))


def readback_from(streams: DeviceStreams | None) -> Readback:
    """Return a readback for work that is launched after this call; `streams` is None on a CPU."""
    return HostReadback() if streams is None else CudaReadback(streams)
