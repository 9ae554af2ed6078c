"""An engine's configuration: `EngineConfig`, its sections, and reading them."""

from graftlm.config.addresses import canonical_host, is_address, is_loopback
from graftlm.config.engine_config import EngineConfig, Setting, explain
from graftlm.config.exposure import exposure_errors, exposure_warnings
from graftlm.config.layers import KeyPath, Layer, Origin, Problem, origin_of
from graftlm.config.problems import nearest, problems_in, report
from graftlm.config.sections import (
    AttentionSettings,
    CacheSettings,
    ChatSettings,
    DrafterSettings,
    EvictionSettings,
    ExecutionSettings,
    GrammarSettings,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    PluginSettings,
    PolicySettings,
    QuantizationSettings,
    SchedulingSettings,
    Section,
    ServerSettings,
    SpeculationSettings,
)

__all__ = [
    "AttentionSettings",
    "CacheSettings",
    "ChatSettings",
    "DrafterSettings",
    "EngineConfig",
    "EvictionSettings",
    "ExecutionSettings",
    "GrammarSettings",
    "KeyPath",
    "Layer",
    "LoraSettings",
    "MemorySettings",
    "ModelSettings",
    "Origin",
    "PluginSettings",
    "PolicySettings",
    "Problem",
    "QuantizationSettings",
    "SchedulingSettings",
    "Section",
    "ServerSettings",
    "Setting",
    "SpeculationSettings",
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
]
