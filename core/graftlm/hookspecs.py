"""All hooks that a plugin may implement. `provide_*` hooks run when an engine is assembled, never per token or layer.

A plugin is a module (or object) with functions marked `@graftlm.hookimpl`. It is found through the entry-point group
`graftlm`, listed in `plugins.modules`, or passed as `Engine(..., plugins=[module])`.
"""

from collections.abc import Iterable

import pluggy

from graftlm.contracts import (
    AttentionBackend,
    Drafter,
    EvictionStrategy,
    GrammarBackend,
    KVStorage,
    LogitsProcessor,
    MediaProcessor,
    Model,
    PrefixCache,
    Provider,
    Quantization,
    ReasoningFormat,
    RoutingPolicy,
    SchedulingPolicy,
    StepExecutor,
    ToolCallFormat,
)
from graftlm.records import CacheEvent, RequestRecord, StepRecord

__all__ = ["hookimpl", "hookspec"]

PROJECT_NAME = "graftlm"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def provide_attention_backends() -> Iterable[Provider[AttentionBackend]]:  # type: ignore[empty-body]
    """Provide attention backends; `create` gets an `AttentionContext`, `capabilities` is an `AttentionCapabilities`."""


@hookspec
def provide_prefix_caches() -> Iterable[Provider[PrefixCache]]:  # type: ignore[empty-body]
    """Provide prefix caches; `create` gets a `CacheContext`, `capabilities` is a `CacheCapabilities`."""


@hookspec
def provide_eviction_strategies() -> Iterable[Provider[EvictionStrategy]]:  # type: ignore[empty-body]
    """Provide eviction strategies; `create` gets an `EvictionContext`."""


@hookspec
def provide_grammar_backends() -> Iterable[Provider[GrammarBackend]]:  # type: ignore[empty-body]
    """Provide grammar backends; `create` gets a `GrammarContext`."""


@hookspec
def provide_models() -> Iterable[Provider[Model]]:  # type: ignore[empty-body]
    """Provide model architectures; `create` gets a `ModelContext`, `capabilities` is a `ModelCapabilities`."""


@hookspec
def provide_media() -> Iterable[Provider[MediaProcessor]]:  # type: ignore[empty-body]
    """Provide media processors; `create` gets a `MediaContext`, `capabilities` is a `MediaCapabilities`."""


@hookspec
def provide_quantizations() -> Iterable[Provider[Quantization]]:  # type: ignore[empty-body]
    """Provide quantizations; `create` gets a `QuantizationContext`, `capabilities` is a `QuantizationCapabilities`."""


@hookspec
def provide_scheduling_policies() -> Iterable[Provider[SchedulingPolicy]]:  # type: ignore[empty-body]
    """Provide scheduling policies; `create` gets a `SchedulingContext`."""


@hookspec
def provide_routing_policies() -> Iterable[Provider[RoutingPolicy]]:  # type: ignore[empty-body]
    """Provide routing policies, which choose a replica for each request; `create` gets a `RoutingContext`."""


@hookspec
def provide_drafters() -> Iterable[Provider[Drafter]]:  # type: ignore[empty-body]
    """Provide drafters for speculative decoding; `create` gets a `DrafterContext`."""


@hookspec
def provide_executors() -> Iterable[Provider[StepExecutor]]:  # type: ignore[empty-body]
    """Provide executors; `create` gets an `ExecutorContext`, `capabilities` is an `ExecutorCapabilities`."""


@hookspec
def provide_kv_storages() -> Iterable[Provider[KVStorage]]:  # type: ignore[empty-body]
    """Provide KV storages; an option of a tiered cache selects one. `create` gets a `StorageContext`."""


@hookspec
def provide_logits_processors() -> Iterable[Provider[LogitsProcessor]]:  # type: ignore[empty-body]
    """Provide logits processors; requests select them. `create` is called with a `LogitsContext` once per request."""


@hookspec
def provide_tool_call_formats() -> Iterable[Provider[ToolCallFormat]]:  # type: ignore[empty-body]
    """Provide tool call formats; `create` gets a `ChatFormatContext`, `capabilities` is a `ChatFormatCapabilities`."""


@hookspec
def provide_reasoning_formats() -> Iterable[Provider[ReasoningFormat]]:  # type: ignore[empty-body]
    """Provide reasoning formats; `create` gets a `ChatFormatContext`, `capabilities` is a `ChatFormatCapabilities`."""


@hookspec
def request_finished(record: RequestRecord) -> None:
    """Observe a request that has ended for any reason. Hooks are looked up once, at assembly. Exceptions are logged."""


@hookspec
def step_finished(record: StepRecord) -> None:
    """Observe a committed step. Hooks are looked up once, at assembly; without one, no record is created."""


@hookspec
def cache_event(event: CacheEvent) -> None:
    """Observe a change of the prefix cache: tokens stored, removed or cleared."""
