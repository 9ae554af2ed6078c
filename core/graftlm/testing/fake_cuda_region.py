"""Records the calls of a function on a fake CUDA device, so that a replay can be compared with its capture."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from graftlm.testing.fake_cuda_errors import GraphRegionError

__all__ = ["FakeCapture", "Region", "tensors_in"]

#: Types of arguments that are compared by value. Tensors are compared by storage and shape, others by type.
_SHOWN: Final = (int, float, str, type(None), torch.dtype, torch.device)


class Region:
    """The calls of a function, each with the storages, offsets, shapes and strides of its tensors.

    A storage that the function creates is identified by its index in order of creation, any other storage by its
    address.

    Attributes:
        calls: one line of text for each call.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._created: dict[int, int] = {}  # storage id -> number in order of creation
        self._kept: list[Tensor] = []  # keeps storages alive, so that no new storage gets the id of an old one

    def add(self, name: str, arguments: Iterable[object], result: object) -> None:
        """Record a call with its arguments and its result."""
        described = [self._describe(leaf) for leaf in _leaves(arguments)]
        given = {_storage_id(tensor) for tensor in tensors_in(arguments)}
        for tensor in tensors_in((result,)):
            self._kept.append(tensor)
            if _storage_id(tensor) not in given:
                self._created.setdefault(_storage_id(tensor), len(self._created))
        self.calls.append(f"{name}({', '.join(described)})")

    def _describe(self, argument: object) -> str:
        if not isinstance(argument, Tensor):
            return repr(argument) if isinstance(argument, _SHOWN) else type(argument).__name__
        self._kept.append(argument)
        storage = _storage_id(argument)
        name = f"#{self._created[storage]}" if storage in self._created else f"storage {storage:#x}"
        shape, strides = list(argument.shape), list(argument.stride())
        return f"{name}+{argument.storage_offset()} {argument.dtype} {shape} by {strides}"


class FakeCapture:
    """A `GraphCapture` for a fake device.

    A real graph replays the same calls on the same tensors. A fake replay runs the function again instead, and raises
    GraphRegionError if the calls or their tensors differ from those of the capture.

    Args:
        record: `FakeCuda.region` of the device: returns a context that records its calls in a region.
    """

    def __init__(self, record: Callable[[Region], AbstractContextManager[None]]) -> None:
        self._record = record

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function twice, like `CudaCapture`.

        Returns:
            A function that runs `function` again, and raises GraphRegionError if its calls differ from those of the
            second run.
        """
        function()
        captured = self._run(function)

        def replay() -> None:
            _compare(captured, self._run(function))

        return replay

    def _run(self, function: Callable[[], None]) -> Region:
        region = Region()
        with self._record(region):
            function()
        return region


def _compare(captured: Region, now: Region) -> None:
    for i, (one, other) in enumerate(zip(captured.calls, now.calls, strict=False)):
        if one != other:
            raise GraphRegionError(
                f"call {i} of a graph differs from the captured call:\n  captured {one}\n  now      {other}"
            )
    if len(captured.calls) != len(now.calls):
        raise GraphRegionError(f"a replay made {len(now.calls)} calls, but the graph has {len(captured.calls)} calls")


def tensors_in(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors in `arguments`, including tensors in lists, tuples and slices."""
    return [leaf for leaf in _leaves(arguments) if isinstance(leaf, Tensor)]


def _leaves(arguments: Iterable[object]) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _leaves(argument)
        elif isinstance(argument, slice):
            yield from (argument.start, argument.stop, argument.step)
        else:
            yield argument


def _storage_id(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
