"""Makes Triton launch kernels on a fake CUDA device. Importing this module imports Triton.

Triton binds the arguments of a launch and specialises the kernel as it does on a GPU. The kernel is neither compiled
nor run; instead, `FakeCuda.launched` is called with its arguments.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, Final

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode

from graftlm.testing.fake_cuda import FakeCuda

__all__ = ["fake_triton"]

#: Numbers for the names of fake devices. Names are unique, because Triton caches compiled kernels by device name.
_numbers: Final = itertools.count()


@contextmanager
def fake_triton(cuda: FakeCuda, capability: int = 90) -> Iterator[None]:
    """Return a context in which Triton launches this thread's kernels on a fake device.

    Args:
        cuda: fake device, whose context must be entered.
        capability: compute capability of the device, e.g. 90 for 9.0.

    Effects: replaces Triton's active driver until the context ends.
    """
    try:
        before = driver.active
    except RuntimeError:  # there is no GPU
        before = None
    driver.set_active(_FakeDriver(f"fake-{next(_numbers)}", capability))
    try:
        with AsyncCompileMode(_NoCompiler(cuda)):
            yield
    finally:
        driver.set_active(before)


class _FakeDriver:
    """A driver for Triton that has only the methods that a launch calls."""

    def __init__(self, name: str, capability: int) -> None:
        self._name = name
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> str:
        return self._name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _NoCompiler(Executor):
    """A compiler for Triton that returns fake kernels."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        source = inspect.getclosurevars(fn).nonlocals["src"]
        future: Future[Any] = Future()
        future.set_result(_FakeKernel(self._cuda, source.name))
        return future


class _FakeKernel:
    """A fake kernel, for one specialisation of a Triton kernel."""

    function = None
    packed_metadata = None

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self._name = name

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: object) -> None:
        """Return no metadata, because only profilers use it."""

    def run(self, *launch: Any) -> None:
        """Report a launch to the fake device.

        Args:
            launch: three sizes of the grid, five internal values of Triton, then the kernel's arguments.
        """
        self._cuda.launched(self._name, [launch[:3], launch[8:]])
