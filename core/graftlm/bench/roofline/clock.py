"""Clocks for a device's work: the host's clock for a CPU, and events in the stream for a GPU."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """A clock that sets marks in a device's work. A mark is opaque; `seconds` compares two marks."""

    def mark(self) -> Any:
        """Return a mark for the time at which the device completes the work that is queued so far."""
        ...

    def sync(self) -> None:
        """Wait until every mark can be read."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, in seconds."""
        ...


class HostClock:
    """The clock of a CPU: the host's clock, because work on a CPU is complete when its call returns."""

    def mark(self) -> int:
        """Return the current time in nanoseconds."""
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Do nothing: marks can be read immediately."""

    def seconds(self, start: int, end: int) -> float:
        """Return the time between two marks, in seconds."""
        return 1e-9 * (end - start)


class CudaClock:
    """The clock of a GPU, which uses events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event after the work that is queued so far."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def sync(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two marks, in seconds."""
        return 1e-3 * float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device's work."""
    return CudaClock() if device.type == "cuda" else HostClock()
