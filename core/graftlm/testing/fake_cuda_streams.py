"""Streams and events of a fake CUDA device: what is ordered before what, and what the host has waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graftlm.testing.fake_cuda_errors import FakeCudaError
from graftlm.testing.fake_cuda_memory import HostMemory, Moment

__all__ = ["FakeEvent", "FakeStream", "FakeStreams"]


class FakeStream:
    """A queue of calls; see `DeviceStream`."""

    def __init__(self, streams: "FakeStreams", stream_id: int) -> None:
        self._streams = streams
        self._id = stream_id
        self._before: dict[int, int] = {stream_id: 0}  # other streams' calls that run before the next one; own calls

    def wait_stream(self, stream: "FakeStream") -> None:
        """Let later work start after the present work of another stream."""
        self.after(stream.moment())

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self._streams.wait(self.moment(), "synchronize of a stream")

    def moment(self) -> Moment:
        """Return what has run when the present work of this stream has."""
        return dict(self._before)

    def after(self, moment: Moment) -> None:
        """Let later work start after a moment."""
        for stream, place in moment.items():
            self._before[stream] = max(self._before.get(stream, 0), place)

    def next_place(self) -> tuple[int, int]:
        """Count a call; return the stream's id and the call's place."""
        self._before[self._id] += 1
        return self._id, self._before[self._id]


class FakeEvent:
    """A point in a stream; see `DeviceEvent`."""

    def __init__(self, streams: "FakeStreams", timed: bool) -> None:
        self._streams = streams
        self._timed = timed
        self._moment: Moment | None = None

    def record(self) -> None:
        """Put the event at the end of the current stream."""
        self._moment = self._streams.current().moment()

    def wait(self) -> None:
        """Let later work of the current stream start after the event."""
        if self._moment is not None:
            self._streams.current().after(self._moment)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._moment is not None:
            self._streams.wait(self._moment, "synchronize of an event")

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        """Return 1 ms, where a device would return a time."""
        if not (self._timed and end_event._timed and self._streams.has_run(end_event._moment)):
            raise FakeCudaError("elapsed_time needs two timed events that have been waited for")
        return 1.0


class FakeStreams:
    """`DeviceStreams` of a fake device.

    Args:
        memory: learns what has run.
        check_wait: called before the host waits, with what for; raises where that is not allowed.
    """

    def __init__(self, memory: HostMemory, check_wait: Callable[[str], None]) -> None:
        self._memory = memory
        self._check_wait = check_wait
        self._num_streams = 0
        self._done: dict[int, int] = {}
        self._current = self.stream()

    def stream(self) -> FakeStream:
        """Return a new stream."""
        self._num_streams += 1
        return FakeStream(self, self._num_streams)

    def current(self) -> FakeStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one while the context is open."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self, *, timed: bool = False) -> FakeEvent:
        """Return a new event."""
        return FakeEvent(self, timed)

    def now(self) -> tuple[int, int]:
        """Count a call of the current stream; return the stream's id and the call's place."""
        return self._current.next_place()

    def wait(self, moment: Moment, what: str) -> None:
        """Let the host wait."""
        self._check_wait(what)
        self.passed(moment)

    def passed(self, moment: Moment) -> None:
        """Note that the host knows what has run."""
        for stream, place in moment.items():
            self._done[stream] = max(self._done.get(stream, 0), place)
        self._memory.arrive(self._done)

    def has_run(self, moment: Moment | None) -> bool:
        """Return whether the host knows that all work before a moment has run."""
        return moment is not None and all(self._done.get(stream, 0) >= place for stream, place in moment.items())
