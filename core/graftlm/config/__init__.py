"""An engine's configuration: `EngineConfig`, its sections, and the reading of files."""

from graftlm.config.addresses import canonical_host, is_address, is_loopback
from graftlm.config.engine_config import EngineConfig, Setting, explain
from graftlm.config.exposure import exposure_errors, exposure_warnings
from graftlm.config.layers import KeyPath, Layer, Origin, Problem, origin_of
from graftlm.config.problems import nearest, problems_in, report
from graftlm.config.section import Section
from graftlm.config.sections import (
    AttentionSettings,
    CacheSettings,
    ChatSettings,
    DrafterSettings,
    EvictionSettings,
    ExecutionSettings,
    GrammarSettings,
    LoraSettings,
    MediaSettings,
    MemorySettings,
    ModelSettings,
    PluginSettings,
    PolicySettings,
    QuantizationSettings,
    SchedulingSettings,
    SpeculationSettings,
)
from graftlm.config.server_sections import (
    BatchSettings,
    FileSettings,
    KVEventSettings,
    ResponseStoreSettings,
    ServerSettings,
    TracesSettings,
)
from graftlm.config.traces import TracesPlan, traces_plan

__all__ = [
    "AttentionSettings",
    "BatchSettings",
    "CacheSettings",
    "ChatSettings",
    "DrafterSettings",
    "EngineConfig",
    "EvictionSettings",
    "ExecutionSettings",
    "FileSettings",
    "GrammarSettings",
    "KVEventSettings",
    "KeyPath",
    "Layer",
    "LoraSettings",
    "MediaSettings",
    "MemorySettings",
    "ModelSettings",
    "Origin",
    "PluginSettings",
    "PolicySettings",
    "Problem",
    "QuantizationSettings",
    "ResponseStoreSettings",
    "SchedulingSettings",
    "Section",
    "ServerSettings",
    "Setting",
    "SpeculationSettings",
    "TracesPlan",
    "TracesSettings",
    "canonical_host",
    "explain",
    "exposure_errors",
    "exposure_warnings",
    "is_address",
    "is_loopback",
    "nearest",
    "origin_of",
    "problems_in",
    "report",
    "traces_plan",
]
