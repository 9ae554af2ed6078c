"""How a plugin offers an implementation: a `Provider`, judged against a `Platform`.

Creating a `Provider` imports nothing heavy; calling its `create` does. The registry validates providers
once, when plugins are loaded; the engine calls `create` once, when it is assembled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["API_VERSION", "OLDEST_API_VERSION", "NoOptions", "Options", "Platform", "Provider"]

#: The plugin API this graftlm speaks. A provider states the one it was written for.
API_VERSION = 1

#: The oldest plugin API whose providers still work here. See docs/api-stability.md.
OLDEST_API_VERSION = 1

T_co = TypeVar("T_co", covariant=True)


class Options(BaseModel):
    """Base of a provider's options: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def machine_obstacles(self) -> Iterable[tuple[str, str]]:
        """Yield (option, reason) for each option that this machine cannot meet; called by `config check`.

        Such as a folder that cannot be written. It must not change anything, and return within a second.
        """
        return ()


class NoOptions(Options):
    """For providers that take no options."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What a provider may ask about the machine before it is created.

    Attributes:
        device: the torch device type tensors will live on, "cpu" or "cuda".
        compute_capability: CUDA compute capability such as (9, 0), or None without a GPU.
    """

    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None


def _always_available(platform: Platform) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[T_co]):
    """One named implementation of one contract.

    Attributes:
        name: what a YAML file writes, unique in its family; lower case.
        summary: one line for `graftlm plugins`.
        api_version: the `API_VERSION` this provider was written for, as a literal.
        create: `create(options, context) -> T`; `options` is an instance of `options` below, `context` the
            family's context dataclass. May import heavy packages. Called once per engine.
        options: pydantic model of the options a YAML file may give; base it on `Options`.
        unavailable: why this provider cannot run on a platform (no CUDA, package missing), or None. Cheap; never
            raises.
        capabilities: the family's capabilities dataclass; core asks it instead of the type.
        rank: among the available, `auto` takes the highest rank; ties go by name.
    """

    name: str
    summary: str
    api_version: int
    create: Callable[[Any, Any], T_co]
    options: type[BaseModel] = NoOptions
    unavailable: Callable[[Platform], str | None] = _always_available
    capabilities: Any = None
    rank: int = 0
