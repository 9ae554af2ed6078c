"""Tools for tests of plugins: a conformance kit for each contract, fakes, and helpers of the kits.

A kit is a class to subclass in a test module. pytest collects the subclass; `run_conformance` runs it without pytest.
Names are imported when they are first used, so that tests of an eviction strategy, for example, do not import torch.
Some tests need the `hypothesis` package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.testing.attention import AttentionBackendConformance
    from graftlm.testing.cache_rig import CacheRig, prompt
    from graftlm.testing.chat_format import ReasoningFormatConformance, ToolCallFormatConformance
    from graftlm.testing.communicator import CommunicatorConformance
    from graftlm.testing.conformance import Conformance, ConformanceResult, iter_conformance, run_conformance
    from graftlm.testing.drafter import DrafterConformance, ScriptedDrafter
    from graftlm.testing.event_mirror import EventMirror
    from graftlm.testing.eviction import EvictionStrategyConformance
    from graftlm.testing.executor import ExecutorConformance
    from graftlm.testing.fake_grammar import FakeGrammarBackend
    from graftlm.testing.fake_storage import FakeKVStorage, FakeMedium
    from graftlm.testing.grammar import GrammarBackendConformance, GrammarCase
    from graftlm.testing.lang_backend import BackendConformance
    from graftlm.testing.logits import LogitsProcessorConformance
    from graftlm.testing.media import MediaConformance
    from graftlm.testing.model import ModelConformance
    from graftlm.testing.naive_cache import NaiveCache
    from graftlm.testing.prefix_cache import PrefixCacheConformance
    from graftlm.testing.provider_kits import provider_kit
    from graftlm.testing.quantization import QuantizationConformance
    from graftlm.testing.recording import OldestAccessFirst, RecordingStrategy, TickingClock
    from graftlm.testing.routing import FakeRoutedRequest, RoutingPolicyConformance
    from graftlm.testing.scheduling import FakePrefixGroup, FakeWaitingRequest, SchedulingPolicyConformance
    from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel
    from graftlm.testing.state_cache import StateCacheConformance
    from graftlm.testing.storage import KVStorageConformance
    from graftlm.testing.window_cache import WindowCacheConformance

__all__ = [
    "AttentionBackendConformance",
    "BackendConformance",
    "CacheRig",
    "CommunicatorConformance",
    "Conformance",
    "ConformanceResult",
    "DrafterConformance",
    "EventMirror",
    "EvictionStrategyConformance",
    "ExecutorConformance",
    "FakeGrammarBackend",
    "FakeKVStorage",
    "FakeMedium",
    "FakePrefixGroup",
    "FakeRoutedRequest",
    "FakeWaitingRequest",
    "GrammarBackendConformance",
    "GrammarCase",
    "KVStorageConformance",
    "LogitsProcessorConformance",
    "MediaConformance",
    "ModelConformance",
    "NaiveCache",
    "OldestAccessFirst",
    "PrefixCacheConformance",
    "QuantizationConformance",
    "ReasoningFormatConformance",
    "RecordingStrategy",
    "RoutingPolicyConformance",
    "SchedulingPolicyConformance",
    "ScriptedApi",
    "ScriptedDrafter",
    "ScriptedModel",
    "StateCacheConformance",
    "TickingClock",
    "ToolCallFormatConformance",
    "WindowCacheConformance",
    "iter_conformance",
    "prompt",
    "provider_kit",
    "run_conformance",
]

_HOME = {
    "AttentionBackendConformance": "graftlm.testing.attention",
    "BackendConformance": "graftlm.testing.lang_backend",
    "CacheRig": "graftlm.testing.cache_rig",
    "CommunicatorConformance": "graftlm.testing.communicator",
    "Conformance": "graftlm.testing.conformance",
    "ConformanceResult": "graftlm.testing.conformance",
    "DrafterConformance": "graftlm.testing.drafter",
    "EventMirror": "graftlm.testing.event_mirror",
    "EvictionStrategyConformance": "graftlm.testing.eviction",
    "ExecutorConformance": "graftlm.testing.executor",
    "FakeGrammarBackend": "graftlm.testing.fake_grammar",
    "FakeKVStorage": "graftlm.testing.fake_storage",
    "FakeMedium": "graftlm.testing.fake_storage",
    "FakePrefixGroup": "graftlm.testing.scheduling",
    "FakeRoutedRequest": "graftlm.testing.routing",
    "FakeWaitingRequest": "graftlm.testing.scheduling",
    "GrammarBackendConformance": "graftlm.testing.grammar",
    "GrammarCase": "graftlm.testing.grammar",
    "KVStorageConformance": "graftlm.testing.storage",
    "LogitsProcessorConformance": "graftlm.testing.logits",
    "MediaConformance": "graftlm.testing.media",
    "ModelConformance": "graftlm.testing.model",
    "NaiveCache": "graftlm.testing.naive_cache",
    "OldestAccessFirst": "graftlm.testing.recording",
    "PrefixCacheConformance": "graftlm.testing.prefix_cache",
    "QuantizationConformance": "graftlm.testing.quantization",
    "ReasoningFormatConformance": "graftlm.testing.chat_format",
    "RecordingStrategy": "graftlm.testing.recording",
    "RoutingPolicyConformance": "graftlm.testing.routing",
    "SchedulingPolicyConformance": "graftlm.testing.scheduling",
    "ScriptedApi": "graftlm.testing.scripted_api",
    "ScriptedDrafter": "graftlm.testing.drafter",
    "ScriptedModel": "graftlm.testing.scripted_api",
    "StateCacheConformance": "graftlm.testing.state_cache",
    "TickingClock": "graftlm.testing.recording",
    "ToolCallFormatConformance": "graftlm.testing.chat_format",
    "WindowCacheConformance": "graftlm.testing.window_cache",
    "iter_conformance": "graftlm.testing.conformance",
    "prompt": "graftlm.testing.cache_rig",
    "provider_kit": "graftlm.testing.provider_kits",
    "run_conformance": "graftlm.testing.conformance",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'graftlm.testing' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
