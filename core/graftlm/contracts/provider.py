"""`Provider`, the record by which a plugin offers an implementation, and `Platform`, the machine's properties.

The creation of a `Provider` must not import heavy packages; `create` may import them. The registry validates providers
once, when plugins are loaded. The engine calls `create` once, at assembly.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["API_VERSION", "OLDEST_API_VERSION", "NoOptions", "Options", "Platform", "Provider"]

#: The plugin API version of this graftlm. `Provider.api_version` is the version that the provider was written for.
API_VERSION = 1

#: The oldest plugin API version that this graftlm supports. See docs/api-stability.md.
OLDEST_API_VERSION = 1

T_co = TypeVar("T_co", covariant=True)


class Options(BaseModel):
    """Base class of a provider's options. Unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def machine_obstacles(self) -> Iterable[tuple[str, str]]:
        """Yield (option, reason) for each option whose value cannot work on this machine; called by `config check`.

        An example is a folder that is not writable. The method must not have effects, and must return within a second.
        """
        return ()


class NoOptions(Options):
    """The options class of a provider without options."""


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
        create: function `create(options, context) -> T`, called once per engine. `options` is an instance of the class
            `options` below; `context` is the family's context dataclass. The function may import heavy packages.
        options: pydantic model of the provider's options in the configuration; a subclass of `Options`.
        unavailable: function that returns why this provider cannot run on a platform, such as "no CUDA" or a missing
            package; None if it can. It must be fast and must not raise.
        capabilities: instance of the family's capabilities dataclass. Core reads it and does not check the type of the
            implementation.
        rank: number that orders providers for `auto`, which selects the available provider with the highest rank. If
            ranks are equal, the first name in alphabetical order is selected.
    """

    name: str
    summary: str
    api_version: int
    create: Callable[[Any, Any], T_co]
    options: type[BaseModel] = NoOptions
    unavailable: Callable[[Platform], str | None] = _always_available
    capabilities: Any = None
    rank: int = 0
