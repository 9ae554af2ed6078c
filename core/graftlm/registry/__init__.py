"""Loads plugins, and finds providers by name with their origin and availability."""

from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.listeners import OBSERVER_HOOKS, Listener
from graftlm.registry.loading import ENTRY_POINT_GROUP, Plugin, PluginFailure
from graftlm.registry.machine import probe_platform
from graftlm.registry.registry import AUTO, Candidate, Entry, Registry
from graftlm.registry.schema import json_schema
from graftlm.registry.selection import (
    Findings,
    Selection,
    check,
    circular_fallbacks,
    configured_drafters,
    configured_executor,
    selections,
)

__all__ = [
    "AUTO",
    "ENTRY_POINT_GROUP",
    "FAMILIES",
    "OBSERVER_HOOKS",
    "Candidate",
    "Entry",
    "Family",
    "Findings",
    "Listener",
    "Plugin",
    "PluginFailure",
    "Registry",
    "Selection",
    "check",
    "circular_fallbacks",
    "configured_drafters",
    "configured_executor",
    "json_schema",
    "probe_platform",
    "selections",
]
