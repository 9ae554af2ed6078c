"""What a plugin implements. Importing this package imports no torch."""

from graftlm.contracts.attention import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    KVCache,
)
from graftlm.contracts.batch import ForwardBatch
from graftlm.contracts.eviction import EvictionContext, EvictionStrategy, NodeStats
from graftlm.contracts.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarKind,
    GrammarMatcher,
    GrammarOptions,
    GrammarSpec,
)
from graftlm.contracts.logits import LogitsContext, LogitsProcessor
from graftlm.contracts.model import Model, ModelCapabilities, ModelConfig, ModelContext
from graftlm.contracts.prefix_cache import (
    NO_PAGES,
    CacheCapabilities,
    CacheContext,
    InsertResult,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
)
from graftlm.contracts.provider import API_VERSION, NoOptions, Options, Platform, Provider
from graftlm.contracts.scheduling import (
    Preemption,
    PrefixGroup,
    SchedulingContext,
    SchedulingPolicy,
    WaitingRequest,
)
from graftlm.contracts.storage import KVStorage, StorageContext, StorageStats
from graftlm.contracts.tiers import LoadedPages, LoadOffer, PrefetchTicket, TieredPrefixCache
from graftlm.contracts.transfer import BlockCopy, KVTransfer, StepCopies
from graftlm.contracts.window import WindowEviction, WindowView

__all__ = [
    "API_VERSION",
    "NO_PAGES",
    "AttentionBackend",
    "AttentionCapabilities",
    "AttentionContext",
    "AttentionLayer",
    "BlockCopy",
    "CacheCapabilities",
    "CacheContext",
    "CompiledGrammar",
    "EvictionContext",
    "EvictionStrategy",
    "ForwardBatch",
    "GrammarBackend",
    "GrammarContext",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarOptions",
    "GrammarSpec",
    "InsertResult",
    "KVCache",
    "KVStorage",
    "KVTransfer",
    "LoadOffer",
    "LoadedPages",
    "LogitsContext",
    "LogitsProcessor",
    "Model",
    "ModelCapabilities",
    "ModelConfig",
    "ModelContext",
    "NoOptions",
    "NodeStats",
    "NodeView",
    "Options",
    "Platform",
    "Preemption",
    "PrefetchTicket",
    "PrefixCache",
    "PrefixGroup",
    "PrefixHandle",
    "PrefixKey",
    "PrefixMatch",
    "ProbePlace",
    "Provider",
    "SchedulingContext",
    "SchedulingPolicy",
    "StepCopies",
    "StorageContext",
    "StorageStats",
    "TieredPrefixCache",
    "WaitingRequest",
    "WindowEviction",
    "WindowView",
]
