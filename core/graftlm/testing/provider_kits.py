"""The conformance kit of a provider: its family's kit, around what the provider creates."""

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

#: Family -> module and class of its kit. Kits are imported when they are asked for: some import torch.
_KITS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "attention": ("graftlm.testing.attention", "AttentionBackendConformance"),
        "cache": ("graftlm.testing.prefix_cache", "PrefixCacheConformance"),
        "drafter": ("graftlm.testing.drafter", "DrafterConformance"),
        "eviction": ("graftlm.testing.eviction", "EvictionStrategyConformance"),
        "grammar": ("graftlm.testing.grammar", "GrammarBackendConformance"),
        "logits_processor": ("graftlm.testing.logits", "LogitsProcessorConformance"),
        "model": ("graftlm.testing.model", "ModelConformance"),
        "quantization": ("graftlm.testing.quantization", "QuantizationConformance"),
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
    """Return the kit that checks what a provider creates, for `run_conformance`.

    Args:
        family: a key of `graftlm.registry.FAMILIES`.
        provider: its `capabilities` narrow what the kits of caches and attention backends ask for.
        create: makes what is checked, from the family's context.
        device: the torch device type that an attention kit uses.
        checkpoint: folder of a small checkpoint, which the kit of models needs.

    Raises:
        ConfigError: the family has no kit, or its kit needs a checkpoint.
    """
    if family not in _KITS:
        raise ConfigError(f"There is no conformance kit for '{family}'. There are for: {', '.join(sorted(_KITS))}.")
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
    if family == "model":
        members["checkpoint"] = _giving(provider, checkpoint)
    if family == "grammar":
        members["cases"] = cached_property(_known_cases)
    module, name = _KITS[family]
    kits: list[type[Conformance]] = [getattr(import_module(module), name)]
    if family == "cache" and provider.capabilities.window and provider.capabilities.reuses:
        kits.append(import_module("graftlm.testing.window_cache").WindowCacheConformance)
        members["parameters"] = {key: values for kit in reversed(kits) for key, values in kit.parameters.items()}
    return type(f"{provider.name} {name}", tuple(kits), members)


def _known_cases(kit: Any) -> tuple[Any, ...]:
    """Return the standard cases that a backend takes: it may refuse whole kinds of specifications.

    Raises:
        SkipTest: it refuses all of them.
    """
    from graftlm.testing.grammar import STANDARD_CASES

    def is_known(case: Any) -> bool:
        try:
            left_out = kit.backend.check(case.spec)
        except GrammarError:
            return False
        return not case.unenforced or bool(left_out)  # what is left out differs from one backend to another

    known = tuple(case for case in STANDARD_CASES if is_known(case))
    if not known:
        raise SkipTest("it refuses every standard case; name `cases` of its own in a GrammarBackendConformance")
    return known


def _giving(provider: Provider[Any], checkpoint: Path | None) -> Callable[[object], Path]:
    if checkpoint is None:
        architectures = ", ".join(provider.capabilities.architectures) or "any"
        raise ConfigError(
            f"The conformance kit of models needs a checkpoint of model '{provider.name}' (architectures: "
            f"{architectures}), with at least 100 tokens in its vocabulary; a small one of random weights will do. "
            "Give its folder with --checkpoint. Of families that graftlm serves itself, "
            "graftlm.testing.tiny_models.write_tiny_checkpoint(Path('tiny'), 'llama') writes one."
        )
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} is no folder of a checkpoint; it has no config.json.")
    return lambda kit: checkpoint
