"""Clocks for a device's work: the host's clock for a CPU, and events in the stream for a GPU."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Sets marks in a device's work. Only `seconds` reads the marks."""

    def mark(self) -> Any:
        """Return a mark for the time at which the device has completed the work queued so far."""
        ...

    def sync(self) -> None:
        """Wait until every mark can be read."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, in seconds."""
        ...


class HostClock:
    """Uses the host's clock: on a CPU, work is complete when a call returns."""

    def mark(self) -> int:
        """Return the current time in nanoseconds."""
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Do nothing: marks can be read immediately."""

    def seconds(self, start: int, end: int) -> float:
        """Return the time between two marks, in seconds."""
        return 1e-9 * (end - start)


class CudaClock:
    """Uses events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event after the work queued so far."""
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
