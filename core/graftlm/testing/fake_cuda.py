"""A fake CUDA device that enforces the rules of a real one. Its tensors have a shape and a device, but no values.

    with FakeCuda() as cuda:
        x = torch.zeros(4, 8, device=cuda.device)   # a FakeTensor
        x.sum().item()                              # HiddenSyncError

Tensors on the CPU are real tensors: numpy works with them, and they can be pinned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from graftlm.testing.fake_cuda_errors import FakeCudaError, GraphRegionError, HiddenSyncError, MixedDevicesError
from graftlm.testing.fake_cuda_indexing import read_index, write_index
from graftlm.testing.fake_cuda_memory import HostMemory
from graftlm.testing.fake_cuda_region import Region, tensors_in
from graftlm.testing.fake_cuda_streams import FakeStreams

__all__ = ["FakeCuda"]

#: Name of a call that waits for a tensor on the device and reads it -> result of the call in a `blocking` context.
_READS: Final[Mapping[str, Callable[[Tensor], Any]]] = {
    "item": lambda tensor: 1,
    "__bool__": lambda tensor: True,
    "__int__": lambda tensor: 1,
    "__index__": lambda tensor: 1,
    "__float__": lambda tensor: 1.0,
    "cpu": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype),
    "numpy": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).numpy(),
    "tolist": lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).tolist(),
}
#: Other calls that wait, because their results depend on a tensor's values.
_WAITS: Final = frozenset(
    {
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
        *("is_nonzero", "equal", "allclose", "__array__", "__contains__"),
    }
)
#: Calls that create a tensor from Python numbers. On a device, they copy from pageable memory and wait.
_FROM_NUMBERS: Final = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
#: Calls that return a view of a tensor and do not read its values.
_VIEWS: Final = frozenset(
    {"__getitem__", "__len__", "dim", "flatten", "narrow", "numel", "select", "size", "split", "view"}
)
#: Calls that only return properties of a tensor, such as its size.
_DESCRIBES: Final = frozenset({"__get__", "__set__", "__repr__", "__hash__"})
#: Alignment of torch's allocations on a device.
_BLOCK_BYTES: Final = 512


class FakeCuda(TorchFunctionMode):
    """A context in which the current thread's PyTorch calls for "cuda" run on a fake device, in inference mode.

    Operations that are slow or not allowed on a GPU raise an error:

        MixedDevicesError   a call has tensors on the CPU and on the device, including 0-dimensional tensors and
                            indices; or a kernel gets a tensor on the CPU.
        HiddenSyncError     the host waits: `.item()`, `bool(x)`, `nonzero`, a mask as an index, a list as an index,
                            `torch.tensor(..., device=...)`, a copy that is blocking or whose host memory is not pinned.
                            During a step's launch, waiting for an event is an error too.
        EarlyReadError      the host reads a tensor before it has waited for an event after the copy to it.
        GraphRegionError    a captured function copies from or to the host, or makes different calls in a replay.

    The first error is also stored, and `check` and the end of the context raise it again. Error handlers in the tested
    code therefore cannot hide an error.

    Copies to the host contain zeros.

    Attributes:
        device: the fake device.
        streams: streams of the device, for arguments of type `DeviceStreams`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self._fake = FakeTensorMode()
        self._inference_mode = torch.inference_mode()
        self._memory = HostMemory()
        self._blocking_reasons: list[str] = []
        self._num_launching = 0
        self._region: Region | None = None
        self._fault: BaseException | None = None
        self.streams = FakeStreams(self._memory, self._check_event)

    def __enter__(self) -> "FakeCuda":
        self._inference_mode.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self._inference_mode.__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self.check()

    def check(self) -> None:
        """Raise the first error again if there was one, even if other code has caught it."""
        if self._fault is not None:
            raise self._fault

    def forget(self) -> None:
        """Delete the stored error, for tests that cause an error on purpose."""
        self._fault = None

    @contextmanager
    def blocking(self, reason: str) -> Iterator[None]:
        """Allow the host to wait in a context, for example during loading. Every number that the host then reads is 1.

        Args:
            reason: reason why waiting is allowed.
        """
        self._blocking_reasons.append(reason)
        try:
            yield
        finally:
            self._blocking_reasons.pop()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Return a context for the launch of a step, in which the host must not wait for events or streams."""
        self._num_launching += 1
        try:
            yield
        finally:
            self._num_launching -= 1

    @contextmanager
    def region(self, region: Region) -> Iterator[None]:
        """Record the calls within a context in a region, like the capture of a CUDA graph."""
        if self._region is not None:
            raise self._kept(GraphRegionError("a captured function captures another one"))
        self._region = region
        try:
            yield
        finally:
            self._region = None

    @property
    def in_region(self) -> bool:
        """Whether calls are being captured."""
        return self._region is not None

    def launched(self, kernel: str, arguments: Sequence[object]) -> None:
        """Check and record the launch of a kernel.

        Args:
            kernel: name of the kernel.
            arguments: all arguments, including the grid; tensors must be on the device.

        Raises:
            MixedDevicesError: a tensor is on the CPU.
        """
        for tensor in tensors_in(arguments):
            if not isinstance(tensor, FakeTensor):
                raise self._kept(MixedDevicesError(f"kernel {kernel} gets a tensor on the CPU, {_described(tensor)}"))
        if self._region is not None:
            self._region.add(kernel, arguments, None)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor on the CPU is in pinned memory."""
        return self._memory.is_pinned(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one PyTorch call; called by PyTorch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _DESCRIBES:
            return func(*args, **kwargs)
        try:
            return self._run(func, name, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._kept(HiddenSyncError(f"{name}: the host waits for numbers of the device ({error})")) from error
        except FakeCudaError as error:
            raise self._kept(error) from None

    def _run(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if name == "data_ptr":
            return _address(on_device[0]) if on_device else func(*args, **kwargs)
        if name == "is_pinned":
            return not on_device and self._memory.is_pinned(tensors[0])
        target = _target(name, args, kwargs)
        if not on_device and (target is None or target.type != "cuda"):
            return self._run_on_host(func, name, args, kwargs, tensors)
        if name in _FROM_NUMBERS:
            return self._from_numbers(func, name, args, kwargs)
        if name in ("to", "cuda"):
            return self._moved(func, name, args, kwargs, target)
        if name == "copy_":
            return self._copied(args[0], args[1], _argument(args, kwargs, 2, "non_blocking", False))
        if on_device and (name in _READS or name in _WAITS):
            self._check_wait(f"{name} of a tensor on the device, {_described(on_device[0])}")
        if len(on_device) < len(tensors):
            host = next(tensor for tensor in tensors if not isinstance(tensor, FakeTensor))
            raise MixedDevicesError(
                f"{name} has tensors on the device and one on the CPU, {_described(host)}: use `to_device`"
            )
        if name in _READS:
            return _READS[name](args[0])
        with self._fake:
            result = self._on_device(func, name, args, kwargs)
        if self._region is not None:
            self._region.add(name, (*args, *kwargs.values()), result)
        return result

    def _on_device(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "__getitem__":
            return read_index(args[0], args[1])
        if name == "__setitem__":
            write_index(args[0], args[1], args[2])
            return None
        if name in ("index_put", "index_put_", "index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise HiddenSyncError(f"{name} with a mask: the host waits for the number of its entries")
        if name == "contiguous":  # PyTorch's `contiguous` needs a device guard, which a build without CUDA lacks
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **kwargs)

    def _run_on_host(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        for tensor in tensors if name not in _VIEWS else ():
            self._memory.check_arrived(tensor, name)
        if name == "pin_memory":
            return self._memory.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self._memory.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _from_numbers(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[-1], FakeTensor) and name != "new_tensor":
            return func(*args, **kwargs)
        self._check_wait(f"torch.{name} on the device copies from pageable memory: use `to_device`")
        made = torch.tensor(args[-1], dtype=kwargs.get("dtype"))
        return self._empty(made, made.dtype)

    def _moved(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], target: Any
    ) -> Any:
        tensor: Tensor = args[0]
        dtype, non_blocking = _conversion(name, args, kwargs)
        if isinstance(tensor, FakeTensor) and (target is None or target.type == "cuda"):
            with self._fake:
                result = func(*args, **kwargs)
            if self._region is not None:
                self._region.add(name, (*args, *kwargs.values()), result)
            return result
        if isinstance(tensor, FakeTensor):
            self._check_wait(f"{name}({target}) of a tensor on the device, {_described(tensor)}")
            return torch.ones(tensor.shape, dtype=dtype or tensor.dtype)
        self._check_copy(tensor, dtype or tensor.dtype, non_blocking, "to the device")
        return self._empty(tensor, dtype or tensor.dtype)

    def _copied(self, into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        if np.broadcast_shapes(into.shape, source.shape) != into.shape:
            raise FakeCudaError(f"copy_ of {list(source.shape)} into {list(into.shape)}")
        if not isinstance(source, FakeTensor):
            self._memory.check_arrived(source, "copy_")
            self._check_copy(source, into.dtype, non_blocking, "to the device")
        elif not isinstance(into, FakeTensor):
            self._check_copy(into, source.dtype, non_blocking, "from the device")
            self._memory.expect(into, self.streams.now())
        elif self._region is not None:
            self._region.add("copy_", (into, source), into)
        return into

    def _check_copy(self, host: Tensor, dtype: torch.dtype, non_blocking: bool, direction: str) -> None:
        """Raise an error if the host would wait for a copy, or if a replay would copy from or to freed host memory."""
        if self._region is not None:
            raise GraphRegionError(f"a captured function copies {direction}, {_described(host)}")
        if not non_blocking:
            self._check_wait(f"a blocking copy {direction}, {_described(host)}")
        elif not self._memory.is_pinned(host):
            self._check_wait(f"a copy {direction} through pageable memory, {_described(host)}: pin it")
        elif not host.is_contiguous() or host.dtype != dtype:
            self._check_wait(
                f"a copy {direction} through pageable memory, {_described(host)}: make it contiguous, of {dtype}"
            )

    def _check_wait(self, what: str) -> None:
        """Raise an error because the host waits, except in a `blocking` context."""
        if not self._blocking_reasons:
            raise self._kept(HiddenSyncError(f"the host waits for the device: {what}"))

    def _check_event(self, what: str) -> None:
        """Raise an error if the host waits for an event while a step is launched or captured."""
        if self._num_launching or self.in_region:
            self._check_wait(what)

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        with self._fake:
            return torch.empty(like.shape, dtype=dtype, device=self.device)

    def _kept(self, error: FakeCudaError) -> FakeCudaError:
        self._fault = self._fault or error
        return error


def _target(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the target device in a call's arguments, or None."""
    if name == "cuda":
        return torch.device("cuda")
    if name == "to":
        if len(args) > 1 and isinstance(args[1], Tensor):
            return args[1].device
        device: torch.device | None = _parse_to(args, kwargs)[0]
        return device
    named = kwargs.get("device")
    if isinstance(named, int):
        return torch.device("cuda", named)
    return None if named is None else torch.device(named)


def _conversion(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.dtype | None, bool]:
    """Return (dtype or None, `non_blocking`) from the arguments of `to` or `cuda`."""
    if name == "cuda":
        return None, bool(_argument(args, kwargs, 2, "non_blocking", False))
    if len(args) > 1 and isinstance(args[1], Tensor):
        return args[1].dtype, bool(_argument(args, kwargs, 2, "non_blocking", False))
    _, dtype, non_blocking, _ = _parse_to(args, kwargs)
    return dtype, non_blocking


def _parse_to(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of `tensor.to`: device, dtype, non_blocking, memory format."""
    return torch._C._nn._parse_to(*args[1:], **{name: value for name, value in kwargs.items() if name != "copy"})


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _address(tensor: Tensor) -> int:
    """Return an address for a tensor, aligned as on a real device."""
    return _BLOCK_BYTES + int(tensor.storage_offset()) * tensor.dtype.itemsize


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
