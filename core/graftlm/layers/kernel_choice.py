"""Chooses the instruction sets of the kernels that are loaded or compiled while a context is active.

Plugins load kernels too. The choice is a context variable, so that the functions in between need not pass it on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from graftlm.errors import ProviderUnavailableError
from graftlm.layers.kernel_levels import LEVELS, NATIVE_FLAGS, KernelLevel, cpu_features, levels_of

__all__ = ["choosing_kernels", "compile_level", "shipped_levels"]

_AUTO: Final = "auto"
_NATIVE: Final = "native"

_choice: ContextVar[str] = ContextVar("graftlm_kernel_choice", default=_AUTO)


@contextmanager
def choosing_kernels(choice: str) -> Iterator[None]:
    """Set the choice for the kernels that this thread or task loads until the context ends.

    Args:
        choice: "auto" loads shipped kernels of the best level that the CPU supports, and compiles other kernels for
            this CPU. "native" compiles all kernels for this CPU. The name of a level loads or compiles kernels of this
            level.

    Raises:
        ProviderUnavailableError: there is no such level, or the CPU does not support it.
    """
    if choice not in (_AUTO, _NATIVE):
        _check(choice)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def shipped_levels() -> Sequence[KernelLevel]:
    """Return the levels whose shipped kernels may be loaded, best first."""
    choice = _choice.get()
    if choice == _NATIVE:
        return ()
    return [level for level in levels_of(*cpu_features()) if choice in (_AUTO, level.name)]


def compile_level() -> tuple[str, Sequence[str]]:
    """Return the name of the target for which kernels are compiled, and its compiler flags."""
    level = next((level for level in LEVELS if level.name == _choice.get()), None)
    return (_NATIVE, NATIVE_FLAGS) if level is None else (level.name, level.flags)


def _check(name: str) -> None:
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        levels = ", ".join(level.name for level in LEVELS)
        raise ProviderUnavailableError(f"there are no kernels {name!r}; expected auto, native, {levels}.")
    if missing := level.missing(*cpu_features()):
        raise ProviderUnavailableError(
            f"this machine cannot run kernels of level {name}: it lacks {', '.join(missing)}. Set model.kernels: auto."
        )
