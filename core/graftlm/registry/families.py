"""The families of providers: names, hooks, contracts and configuration keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from graftlm.contracts import (
    AttentionBackend,
    AttentionCapabilities,
    CacheCapabilities,
    ChatFormatCapabilities,
    Drafter,
    EvictionStrategy,
    ExecutorCapabilities,
    GrammarBackend,
    KVStorage,
    LogitsProcessor,
    MediaCapabilities,
    MediaProcessor,
    Model,
    ModelCapabilities,
    PrefixCache,
    Quantization,
    QuantizationCapabilities,
    ReasoningFormat,
    RoutingPolicy,
    SchedulingPolicy,
    StepExecutor,
    ToolCallFormat,
)

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of replaceable part.

    Attributes:
        key: the family's name in `plugins.prefer`, `graftlm plugins` and calls of the registry.
        title: the family's name in messages.
        hook: the hook through which plugins provide this part.
        contract: the type of the object that `create` returns.
        capabilities: the type of `Provider.capabilities`; None if the family has no capabilities.
        name_path: configuration key of the name; None if requests name the provider.
        options_path: configuration key of the options; None if the configuration has none.
        is_optional: whether an engine runs without a provider of this family.
        has_auto: whether "auto" selects a provider; otherwise a missing name selects none.
    """

    key: str
    title: str
    hook: str
    contract: type[Any]
    capabilities: type[Any] | None = None
    name_path: str | None = None
    options_path: str | None = None
    is_optional: bool = False
    has_auto: bool = True


_ALL = (
    Family(
        key="attention",
        title="attention backend",
        hook="provide_attention_backends",
        contract=AttentionBackend,
        capabilities=AttentionCapabilities,
        name_path="attention.name",
        options_path="attention.options",
    ),
    Family(
        key="cache",
        title="prefix cache",
        hook="provide_prefix_caches",
        contract=PrefixCache,
        capabilities=CacheCapabilities,
        name_path="cache.name",
        options_path="cache.options",
    ),
    Family(
        key="eviction",
        title="eviction strategy",
        hook="provide_eviction_strategies",
        contract=EvictionStrategy,
        name_path="cache.eviction.name",
        options_path="cache.eviction.options",
    ),
    Family(
        key="grammar",
        title="grammar backend",
        hook="provide_grammar_backends",
        contract=GrammarBackend,
        name_path="grammar.name",
        options_path="grammar.options",
        is_optional=True,
    ),
    Family(
        key="model",
        title="model",
        hook="provide_models",
        contract=Model,
        capabilities=ModelCapabilities,
        name_path="model.architecture",
    ),
    Family(
        key="media",
        title="media processor",
        hook="provide_media",
        contract=MediaProcessor,
        capabilities=MediaCapabilities,
        name_path="media.name",
        options_path="media.options",
        is_optional=True,
    ),
    Family(
        key="quantization",
        title="quantization",
        hook="provide_quantizations",
        contract=Quantization,
        capabilities=QuantizationCapabilities,
        name_path="model.quantization.name",
        options_path="model.quantization.options",
        is_optional=True,
        has_auto=False,
    ),
    Family(
        key="scheduling",
        title="scheduling policy",
        hook="provide_scheduling_policies",
        contract=SchedulingPolicy,
        name_path="scheduling.policy.name",
        options_path="scheduling.policy.options",
    ),
    Family(
        key="routing_policy",
        title="routing policy",
        hook="provide_routing_policies",
        contract=RoutingPolicy,
        name_path="parallel.routing.name",
        options_path="parallel.routing.options",
        is_optional=True,
    ),
    Family(
        key="drafter",
        title="drafter",
        hook="provide_drafters",
        contract=Drafter,
        name_path="speculation.drafter.name",
        options_path="speculation.drafter.options",
        is_optional=True,
    ),
    Family(
        key="executor",
        title="executor",
        hook="provide_executors",
        contract=StepExecutor,
        capabilities=ExecutorCapabilities,
        name_path="parallel.executor",
        options_path="parallel.options",
        is_optional=True,
    ),
    Family(
        key="storage",
        title="KV storage",
        hook="provide_kv_storages",
        contract=KVStorage,
        is_optional=True,
    ),
    Family(
        key="logits_processor",
        title="logits processor",
        hook="provide_logits_processors",
        contract=LogitsProcessor,
        is_optional=True,
    ),
    Family(
        key="tool_calls",
        title="tool call format",
        hook="provide_tool_call_formats",
        contract=ToolCallFormat,
        capabilities=ChatFormatCapabilities,
        name_path="chat.tool_call_format",
        is_optional=True,
    ),
    Family(
        key="reasoning",
        title="reasoning format",
        hook="provide_reasoning_formats",
        contract=ReasoningFormat,
        capabilities=ChatFormatCapabilities,
        name_path="chat.reasoning_format",
        is_optional=True,
    ),
)

#: Families by key.
FAMILIES: Mapping[str, Family] = MappingProxyType({family.key: family for family in _ALL})
