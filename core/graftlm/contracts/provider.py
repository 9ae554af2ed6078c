"""The record with which a plugin offers an implementation (`Provider`), and the machine's properties (`Platform`).

Creating a `Provider` imports no heavy packages; its `create` may import them. The registry validates providers once,
when plugins are loaded. The engine calls `create` once, at assembly.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["API_VERSION", "OLDEST_API_VERSION", "NoOptions", "Options", "Platform", "Provider"]

#: The plugin API version of this graftlm. A provider has the version that it was written for.
API_VERSION = 1

#: The oldest plugin API version that this graftlm supports. See docs/api-stability.md.
OLDEST_API_VERSION = 1

T_co = TypeVar("T_co", covariant=True)


class Options(BaseModel):
    """Base class of a provider's options: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def machine_obstacles(self) -> Iterable[tuple[str, str]]:
        """Yield (option, reason) for each option that this machine cannot satisfy; called by `config check`.

        An example is a folder that is not writable. This method must change nothing and return within a second.
        """
        return ()


class NoOptions(Options):
    """The options of providers that have none."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Properties of the machine that a provider may read before it is created.

    Attributes:
        device: the torch device type of the tensors, "cpu" or "cuda".
        compute_capability: CUDA compute capability, such as (9, 0); None without a GPU.
    """

    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None


def _always_available(platform: Platform) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[T_co]):
    """One named implementation of one contract.

    Attributes:
        name: the name in configuration files, in lower case; unique in its family.
        summary: description for `graftlm plugins`, one line.
        api_version: the `API_VERSION` that this provider was written for, as a literal.
        create: function `create(options, context) -> T`; `options` is an instance of `options` below, `context` the
            family's context dataclass. It may import heavy packages. It is called once per engine.
        options: pydantic model of the provider's options in the configuration; a subclass of `Options`.
        unavailable: function that returns why this provider cannot run on a platform (no CUDA, package missing), or
            None. It is cheap and never raises.
        capabilities: instance of the family's capabilities dataclass; core reads it instead of the implementation's
            type.
        rank: number that orders providers for `auto`, which selects the available provider with the highest rank. Among
            equal ranks, the first by name is selected.
    """

    name: str
    summary: str
    api_version: int
    create: Callable[[Any, Any], T_co]
    options: type[BaseModel] = NoOptions
    unavailable: Callable[[Platform], str | None] = _always_available
    capabilities: Any = None
    rank: int = 0
