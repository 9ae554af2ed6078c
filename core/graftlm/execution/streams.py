"""Streams and events of the device that runs the steps."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "DeviceEvent", "DeviceStream", "DeviceStreams", "streams_of"]


class DeviceStream(Protocol):
    """A queue of work on the device; see `torch.cuda.Stream`."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work in this stream wait for the work queued in another stream so far. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the work of this stream is done."""
        ...


class DeviceEvent(Protocol):
    """A point in a stream; see `torch.cuda.Event`."""

    def record(self) -> None:
        """Record the event at the end of the current stream."""
        ...

    def wait(self) -> None:
        """Make later work in the current stream wait for the event. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for the event; return immediately if the event was not recorded."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time in milliseconds from this event to a later one. Both must be timed and complete."""
        ...


class DeviceStreams(Protocol):
    """Creates and selects the streams of one device."""

    def stream(self) -> DeviceStream:
        """Return a new stream."""
        ...

    def current(self) -> DeviceStream:
        """Return this thread's current stream, to which its work is added."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one while the context is open."""
        ...

    def event(self, *, timed: bool = False) -> DeviceEvent:
        """Return a new event. `elapsed_time` needs timed events. A thread that waits for a timed event sleeps."""
        ...


class CudaStreams:
    """`DeviceStreams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """Return the current stream."""
        return torch.cuda.current_stream(self._device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Make a stream the current one while the context is open."""
        return torch.cuda.stream(stream)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """Return a new event."""
        return torch.cuda.Event(enable_timing=timed, blocking=timed)  # type: ignore[no-untyped-call]


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device; None for a CPU, which has no streams."""
    return None if device.type == "cpu" else CudaStreams(device)
