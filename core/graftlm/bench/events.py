"""Splits the bytes of an HTTP answer into server-sent events."""

__all__ = ["EventSplitter"]


class EventSplitter:
    """A splitter of a byte stream into the data of server-sent events; comments and other fields are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            content = line.removesuffix(b"\r")
            if content.startswith(b"data:"):
                self._data.append(content[5:].removeprefix(b" "))
            elif not content and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
