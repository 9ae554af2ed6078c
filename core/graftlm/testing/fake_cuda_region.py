"""What a function does on a fake CUDA device: the calls of a region that a graph captures, for comparison."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from graftlm.testing.fake_cuda_errors import GraphRegionError

if TYPE_CHECKING:
    from graftlm.testing.fake_cuda import FakeCuda

__all__ = ["FakeCapture", "Region", "tensors_in"]

#: Arguments that a call is compared by; others by their type.
_SHOWN: Final = (int, float, str, type(None), torch.dtype, torch.device)


class Region:
    """The calls of a function, each with the places, shapes and strides of its tensors.

    A tensor that the function makes is named by its number among them; others by their storage.

    Attributes:
        calls: a line for each.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no other storage takes the place of one

    def add(self, name: str, arguments: Iterable[object], result: object) -> None:
        """Record a call."""
        described = [self._describe(leaf) for leaf in _leaves(arguments)]
        given = {_place(tensor) for tensor in tensors_in(arguments)}
        for tensor in tensors_in((result,)):
            self._kept.append(tensor)
            if _place(tensor) not in given:
                self._made.setdefault(_place(tensor), len(self._made))
        self.calls.append(f"{name}({', '.join(described)})")

    def _describe(self, argument: object) -> str:
        if not isinstance(argument, Tensor):
            return repr(argument) if isinstance(argument, _SHOWN) else type(argument).__name__
        self._kept.append(argument)
        place = _place(argument)
        name = f"#{self._made[place]}" if place in self._made else f"storage {place:#x}"
        shape, strides = list(argument.shape), list(argument.stride())
        return f"{name}+{argument.storage_offset()} {argument.dtype} {shape} by {strides}"


class FakeCapture:
    """Captures functions on a fake device; implements `GraphCapture`.

    A replay runs the function again, and fails if it does not do what it did when it was captured, to the same
    tensors: a graph would.
    """

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function twice, as `CudaCapture` does; return what runs and compares it."""
        function()
        captured = self._run(function)

        def replay() -> None:
            _compare(captured, self._run(function))

        return replay

    def _run(self, function: Callable[[], None]) -> Region:
        region = Region()
        with self._cuda.region(region):
            function()
        return region


def _compare(captured: Region, now: Region) -> None:
    for i, (one, other) in enumerate(zip(captured.calls, now.calls, strict=False)):
        if one != other:
            raise GraphRegionError(
                f"call {i} of a graph is not what was captured:\n  captured {one}\n  now      {other}"
            )
    if len(captured.calls) != len(now.calls):
        raise GraphRegionError(f"a graph of {len(captured.calls)} calls is repeated by {len(now.calls)}")


def tensors_in(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors among arguments, in lists, tuples and slices too."""
    return [leaf for leaf in _leaves(arguments) if isinstance(leaf, Tensor)]


def _leaves(arguments: Iterable[object]) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _leaves(argument)
        elif isinstance(argument, slice):
            yield from (argument.start, argument.stop, argument.step)
        else:
            yield argument


def _place(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
