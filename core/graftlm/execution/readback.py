"""Results on their way from the device to the host."""

import time
from typing import Protocol

import torch
from torch import Tensor

from graftlm.execution.streams import DeviceStreams

__all__ = ["CudaReadback", "HostReadback", "Readback", "readback_from"]


class Readback(Protocol):
    """Takes tensors to the host, and the time from its making until the last of them is computed."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Ask for a tensor; returns one on the host that holds its values once `wait` has returned."""
        ...

    def close(self) -> None:
        """Say that nothing more will be asked for."""
        ...

    def wait(self) -> float:
        """Wait for what was asked for; returns the seconds that the device took, work before not counted."""
        ...


class HostReadback:
    """On a CPU everything is there at once."""

    def __init__(self) -> None:
        self._start_s = self._end_s = time.perf_counter()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def close(self) -> None:
        """Stop the clock."""
        self._end_s = time.perf_counter()

    def wait(self) -> float:
        """Return the seconds until `close`."""
        return self._end_s - self._start_s


class CudaReadback:
    """Copies into pinned memory, in the current stream, with an event behind the last copy.

    Waiting releases the interpreter lock and sleeps: with overlap, the next step runs meanwhile.
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
        """Put the event behind the copies."""
        self._end.record()

    def wait(self) -> float:
        """Wait for the event; the time between the two is the device's own."""
        self._end.synchronize()
        return 1e-3 * float(self._start.elapsed_time(self._end))


def readback_from(streams: DeviceStreams | None) -> Readback:
    """Return a readback of what is launched from now on; `streams` is None on a CPU."""
    return HostReadback() if streams is None else CudaReadback(streams)
