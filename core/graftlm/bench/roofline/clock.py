"""How time is read: beside the CPU's work by its clock, within a GPU's work by events."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Marks moments in a device's work. Marks are opaque; only `seconds` reads them."""

    def mark(self) -> Any:
        """Mark the moment at which the device has done what was asked of it so far."""
        ...

    def sync(self) -> None:
        """Wait until every mark can be read."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks."""
        ...


class HostClock:
    """Marks by the CPU's clock: what was asked for is done when the call returns."""

    def mark(self) -> int:
        """Return nanoseconds."""
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Do nothing: a mark can be read at once."""

    def seconds(self, start: int, end: int) -> float:
        """Return the time between two marks."""
        return 1e-9 * (end - start)


class CudaClock:
    """Marks by events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Put an event behind the work asked for so far."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def sync(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two marks."""
        return 1e-3 * float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """Return the clock that a device's work is timed by."""
    return CudaClock() if device.type == "cuda" else HostClock()
