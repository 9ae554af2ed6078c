"""Creates the conformance kit of a provider: the kit of its family, applied to the provider's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import SkipTest

from graftlm.contracts import Provider
from graftlm.errors import ConfigError, GrammarError
from graftlm.testing.conformance import Conformance

__all__ = ["provider_kit"]

#: Family -> (module, class) of its kit. A kit is imported when it is used, because some kits import torch.
_KITS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "attention": ("graftlm.testing.attention", "AttentionBackendConformance"),
        "cache": ("graftlm.testing.prefix_cache", "PrefixCacheConformance"),
        "drafter": ("graftlm.testing.drafter", "DrafterConformance"),
        "eviction": ("graftlm.testing.eviction", "EvictionStrategyConformance"),
        "executor": ("graftlm.testing.executor", "ExecutorConformance"),
        "grammar": ("graftlm.testing.grammar", "GrammarBackendConformance"),
        "media": ("graftlm.testing.media", "MediaConformance"),
        "logits_processor": ("graftlm.testing.logits", "LogitsProcessorConformance"),
        "model": ("graftlm.testing.model", "ModelConformance"),
        "quantization": ("graftlm.testing.quantization", "QuantizationConformance"),
        "routing_policy": ("graftlm.testing.routing", "RoutingPolicyConformance"),
        "scheduling": ("graftlm.testing.scheduling", "SchedulingPolicyConformance"),
        "reasoning": ("graftlm.testing.chat_format", "ReasoningFormatConformance"),
        "storage": ("graftlm.testing.storage", "KVStorageConformance"),
        "tool_calls": ("graftlm.testing.chat_format", "ToolCallFormatConformance"),
    }
)


def provider_kit(
    family: str,
    provider: Provider[Any],
    create: Callable[[Any], Any],
    *,
    device: str = "cpu",
    checkpoint: Path | None = None,
) -> type[Conformance]:
    """Return a kit for `run_conformance` that checks the objects of a provider.

    Args:
        family: a key of `graftlm.registry.FAMILIES`.
        provider: the provider. Kits only test features that its `capabilities` claim.
        create: function from the family's context to an object to check.
        device: the torch device type that an attention kit uses.
        checkpoint: folder of a small checkpoint, which the kits for models and media processors require.

    Raises:
        ConfigError: the family has no kit, or its kit needs a checkpoint.
    """
    if family not in _KITS:
        raise ConfigError(
            f"There is no conformance kit for '{family}'. Families with a kit: {', '.join(sorted(_KITS))}."
        )
    members: dict[str, Any] = {"create": lambda self, context: create(context)}
    if family == "cache":
        members["reuses"] = provider.capabilities.reuses
        members["granularity_tokens"] = provider.capabilities.granularity_tokens
    if family == "attention":
        members |= {"capabilities": provider.capabilities, "device": device}
    if family == "quantization":
        members |= {"device": provider.capabilities.devices[0]}
        if provider.capabilities.dtypes is not None:
            members["dtypes"] = provider.capabilities.dtypes
    if family in ("media", "model"):
        members["checkpoint"] = _checkpoint_method(family, provider, checkpoint)
    if family == "executor":
        members["capabilities"] = provider.capabilities
    if family == "grammar":
        members["cases"] = cached_property(_known_cases)
    module, name = _KITS[family]
    kits: list[type[Conformance]] = [getattr(import_module(module), name)]
    if family == "cache" and provider.capabilities.window and provider.capabilities.reuses:
        kits.append(import_module("graftlm.testing.window_cache").WindowCacheConformance)
    if family == "cache" and provider.capabilities.state and provider.capabilities.reuses:
        kits.append(import_module("graftlm.testing.state_cache").StateCacheConformance)
    if len(kits) > 1:
        members["parameters"] = {key: values for kit in reversed(kits) for key, values in kit.parameters.items()}
    return type(f"{provider.name} {name}", tuple(kits), members)


def _known_cases(kit: Any) -> tuple[Any, ...]:
    """Return the standard cases whose specifications a grammar backend accepts; it may refuse some kinds.

    Raises:
        SkipTest: the backend refuses all cases.
    """
    from graftlm.testing.grammar import STANDARD_CASES

    def is_known(case: Any) -> bool:
        try:
            unenforced = kit.backend.check(case.spec)
        except GrammarError:
            return False
        return not case.unenforced or bool(unenforced)  # backends enforce different keywords

    known = tuple(case for case in STANDARD_CASES if is_known(case))
    if not known:
        raise SkipTest(
            "the backend refuses every standard case; define your own `cases` in a subclass of "
            "GrammarBackendConformance"
        )
    return known


def _checkpoint_method(family: str, provider: Provider[Any], checkpoint: Path | None) -> Callable[[object], Path]:
    """Return a function to use as the method `checkpoint` of a kit.

    Raises:
        ConfigError: `checkpoint` is None.
    """
    if checkpoint is None:
        architectures = ", ".join(provider.capabilities.architectures) or "any"
        raise ConfigError(
            f"The conformance kit needs a checkpoint of {family} '{provider.name}' (architectures: "
            f"{architectures}) with at least 100 tokens in its vocabulary. A small one with random weights is enough. "
            "Pass its folder with --checkpoint. For families that graftlm supports, you can write one with "
            "graftlm.testing.tiny_models.write_tiny_checkpoint(Path('tiny'), 'llama')."
        )
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} is not the folder of a checkpoint: it has no config.json.")
    return lambda kit: checkpoint
