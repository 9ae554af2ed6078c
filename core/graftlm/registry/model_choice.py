"""Which model providers suit a checkpoint: those that name its architecture, or else those that take any."""

from collections.abc import Callable, Sequence
from typing import Any

from graftlm.contracts import Provider

__all__ = ["model_misfit"]


def model_misfit(
    architectures: Sequence[str], providers: Sequence[Provider[Any]]
) -> Callable[[Provider[Any]], str | None] | None:
    """Return what says why a provider does not suit a checkpoint, or None where none of them does.

    Args:
        architectures: what its config.json says.
        providers: of the family `model`.
    """
    named = {name for provider in providers for name in provider.capabilities.architectures}
    claimed = named.intersection(architectures)
    if not claimed and not any(provider.capabilities.any_architecture for provider in providers):
        return None
    wanted = " or ".join(name for name in architectures if name in claimed or not claimed)

    def misfit(provider: Provider[Any]) -> str | None:
        can = provider.capabilities
        suits = not claimed.isdisjoint(can.architectures) if claimed else can.any_architecture
        return None if suits else f"does not serve {wanted}"

    return misfit
