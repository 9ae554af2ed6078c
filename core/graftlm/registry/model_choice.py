"""Finds the model providers for a checkpoint: the providers that list its architecture, else the general ones."""

from collections.abc import Callable, Sequence
from typing import Any

from graftlm.contracts import Provider

__all__ = ["model_misfit"]


def model_misfit(
    architectures: Sequence[str], providers: Sequence[Provider[Any]]
) -> Callable[[Provider[Any]], str | None] | None:
    """Return a function that returns why a provider does not match a checkpoint; None if no provider matches.

    Args:
        architectures: the architectures in the checkpoint's config.json.
        providers: all providers of the family `model`.
    """
    named = {name for provider in providers for name in provider.capabilities.architectures}
    claimed = named.intersection(architectures)
    if not claimed and not any(provider.capabilities.any_architecture for provider in providers):
        return None
    wanted = " or ".join(name for name in architectures if name in claimed or not claimed)

    def misfit(provider: Provider[Any]) -> str | None:
        can = provider.capabilities
        suits = not claimed.isdisjoint(can.architectures) if claimed else can.any_architecture
        return None if suits else f"does not support {wanted}"

    return misfit
