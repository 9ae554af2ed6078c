"""The backend of programs that name none."""

import asyncio
from typing import Any

from graftlm.errors import ConfigError
from graftlm.lang.backend import Backend
from graftlm.lang.backends.engine import EngineBackend, InProcessEngine
from graftlm.lang.event_loop import shared_loop

__all__ = ["as_backend", "default_backend", "flush_cache", "resolve", "set_default_backend"]

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """Use a backend for every program that names none; None: have no default any more.

    Args:
        backend: an Engine, a RuntimeEndpoint, or any Backend.
    """
    _default[:] = [] if backend is None else [as_backend(backend)]


def default_backend() -> Backend | None:
    """Return what `set_default_backend` has set."""
    return _default[0] if _default else None


def as_backend(backend: Any) -> Backend:
    """Return a backend: the object itself, or one over an engine of this process.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(backend, type):  # which has the methods of a Backend, too
        raise ConfigError(f"a backend is an object, got the class {backend.__name__}; write {backend.__name__}(...)")
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, InProcessEngine):
        return EngineBackend(backend)
    raise ConfigError(
        f"a backend is an Engine, a RuntimeEndpoint, an OpenAI or a graftlm.lang.Backend, got {type(backend).__name__}"
    )


def resolve(backend: Any) -> Backend:
    """Return the backend of one run: what it names, else the default.

    Raises:
        ConfigError: there is neither.
    """
    if backend is not None:
        return as_backend(backend)
    if (default := default_backend()) is None:
        raise ConfigError(
            "this run has no backend: give it one, run(..., backend=engine), or set_default_backend(engine)"
        )
    return default


def flush_cache(backend: Any = None) -> None:
    """Have the backend forget every cached prefix that no running request uses.

    Args:
        backend: as of `run`.

    Raises:
        GraftlmError: it cannot.
    """
    asyncio.run_coroutine_threadsafe(resolve(backend).flush_cache(), shared_loop()).result()
