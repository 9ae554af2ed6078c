"""Streams and events of a fake CUDA device, which record the order of calls, and the calls that the host waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graftlm.testing.fake_cuda_errors import FakeCudaError
from graftlm.testing.fake_cuda_memory import HostMemory, Moment

__all__ = ["FakeEvent", "FakeStream", "FakeStreams"]


class FakeStream:
    """A `DeviceStream` of a fake device."""

    def __init__(self, streams: "FakeStreams", stream_id: int) -> None:
        self._streams = streams
        self._id = stream_id
        # Stream id -> number of calls of the stream that run before this stream's next call. For this stream's own id,
        # this is the number of all its calls.
        self._before: dict[int, int] = {stream_id: 0}

    def wait_stream(self, stream: "FakeStream") -> None:
        """Make later work of this stream start after the present work of another stream."""
        self.after(stream.moment())

    def synchronize(self) -> None:
        """Make the host wait for this stream."""
        self._streams.wait(self.moment(), "synchronize of a stream")

    def moment(self) -> Moment:
        """Return stream id -> number of calls that have run when all present work of this stream is complete."""
        return dict(self._before)

    def after(self, moment: Moment) -> None:
        """Make later work of this stream start after the calls of a moment."""
        for stream, position in moment.items():
            self._before[stream] = max(self._before.get(stream, 0), position)

    def next_position(self) -> tuple[int, int]:
        """Count a call of this stream; return (stream id, position of the call, starting at 1)."""
        self._before[self._id] += 1
        return self._id, self._before[self._id]


class FakeEvent:
    """A `DeviceEvent` of a fake device: a position in a stream."""

    def __init__(self, streams: "FakeStreams", timed: bool) -> None:
        self._streams = streams
        self._timed = timed
        self._moment: Moment | None = None

    def record(self) -> None:
        """Put the event at the end of the current stream."""
        self._moment = self._streams.current().moment()

    def wait(self) -> None:
        """Make later work of the current stream start after the event."""
        if self._moment is not None:
            self._streams.current().after(self._moment)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        if self._moment is not None:
            self._streams.wait(self._moment, "synchronize of an event")

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        """Return 1 ms. A real device returns the measured time.

        Raises:
            FakeCudaError: an event is not timed, or the host has not waited for `end_event`.
        """
        if not (self._timed and end_event._timed and self._streams.has_run(end_event._moment)):
            raise FakeCudaError("elapsed_time needs two timed events, and the host must have waited for them")
        return 1.0


class FakeStreams:
    """The `DeviceStreams` of a fake device.

    Args:
        memory: host memory; its `arrive` is called when calls have run.
        check_wait: function that is called with a description before the host waits, and raises an error if waiting is
            not allowed.
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
        """Count a call of the current stream; return (stream id, position of the call, starting at 1)."""
        return self._current.next_position()

    def wait(self, moment: Moment, what: str) -> None:
        """Make the host wait for the calls of a moment; `what` is a description for the error message."""
        self._check_wait(what)
        self.passed(moment)

    def passed(self, moment: Moment) -> None:
        """Record that the host has waited for the calls of a moment."""
        for stream, position in moment.items():
            self._done[stream] = max(self._done.get(stream, 0), position)
        self._memory.arrive(self._done)

    def has_run(self, moment: Moment | None) -> bool:
        """Return whether the host has waited for all calls of a moment; False if `moment` is None."""
        return moment is not None and all(self._done.get(stream, 0) >= position for stream, position in moment.items())
