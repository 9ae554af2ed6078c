"""The backend of runs that do not set one."""

from typing import Any, Protocol, runtime_checkable

from graftlm.errors import ConfigError, UnsupportedFeatureError
from graftlm.lang.backend import Backend
from graftlm.lang.backends.engine import EngineBackend, InProcessEngine
from graftlm.lang.event_loop import wait_in_shared_loop

__all__ = ["as_backend", "default_backend", "flush_cache", "get_server_info", "resolve", "set_default_backend"]

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """Set the backend of runs that do not set one; None removes the default.

    Args:
        backend: an Engine, a RuntimeEndpoint, or any Backend.
    """
    _default[:] = [] if backend is None else [as_backend(backend)]


def default_backend() -> Backend | None:
    """Return the backend that `set_default_backend` has set, or None."""
    return _default[0] if _default else None


def as_backend(backend: Any) -> Backend:
    """Return the Backend for an object: a Backend itself, the endpoint of a Runtime, or an Engine of this process.

    An Engine is wrapped into an EngineBackend.

    Raises:
        ConfigError: the object is not a Backend, a Runtime or an Engine.
    """
    if isinstance(backend, type):  # a class has the methods of a Backend too, so it would pass the check below
        raise ConfigError(f"a backend is an object, got the class {backend.__name__}; write {backend.__name__}(...)")
    if isinstance(backend, Backend):
        return backend
    if isinstance(endpoint := getattr(backend, "endpoint", None), Backend):
        return endpoint
    if isinstance(backend, InProcessEngine):
        return EngineBackend(backend)
    raise ConfigError(
        f"a backend is an Engine, a RuntimeEndpoint, an OpenAI or a graftlm.lang.Backend, got {type(backend).__name__}"
    )


def resolve(backend: Any) -> Backend:
    """Return the backend of one run: the run's own backend if it is set, else the default.

    Raises:
        ConfigError: neither is set.
    """
    if backend is not None:
        return as_backend(backend)
    if (default := default_backend()) is None:
        raise ConfigError("this run has no backend; use run(..., backend=engine) or set_default_backend(engine)")
    return default


def flush_cache(backend: Any = None) -> None:
    """Remove every cached prefix of the backend that no running request uses.

    Args:
        backend: see `Program.run`.

    Raises:
        GraftlmError: the backend refuses, or fails.
    """
    wait_in_shared_loop(_flush(resolve(backend)))


async def _flush(backend: Backend) -> None:
    await backend.flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Return the configuration and the state of a backend's server or engine.

    Args:
        backend: see `Program.run`.

    Raises:
        UnsupportedFeatureError: the backend does not report them.
        GraftlmError: the server refuses, or cannot be reached.
    """
    chosen = resolve(backend)
    if not isinstance(chosen, _Informative):
        raise UnsupportedFeatureError(f"get_server_info: {type(chosen).__name__} does not report a server's state")
    return chosen.get_server_info()


@runtime_checkable
class _Informative(Protocol):
    def get_server_info(self) -> dict[str, Any]: ...
