"""Lists the provider of each family that an engine uses, with the reason, for the log, /server_info and --dry-run."""

from collections.abc import Mapping
from typing import Any

from graftlm.chat.chat_formats import template_misfit
from graftlm.config import EngineConfig, origin_of
from graftlm.contracts import Provider
from graftlm.errors import UnknownProviderError
from graftlm.registry import AUTO, Registry, configured_drafters, selections

__all__ = ["ResolvedPlugins", "resolve_plugins", "resolved_line"]

#: family -> {"name", "distribution", "why"}
ResolvedPlugins = dict[str, dict[str, str]]


def resolve_plugins(
    config: EngineConfig,
    registry: Registry,
    chosen: Mapping[str, Provider[Any] | None],
    *,
    device: str = "",
    chat_template: str = "",
) -> ResolvedPlugins:
    """Return the providers that a configuration selects.

    Args:
        chosen: family -> chosen provider, for families that are set to "auto" and whose choice depends on more than the
            rank; None if no provider was chosen.
        device: the condition for an automatic choice of model and attention, such as "cpu/bfloat16".
        chat_template: the condition for an automatic choice of chat formats.

    Returns: an entry for each family with a provider. A family whose choice depends on more than the rank has no entry
        if it is set to "auto" and is missing in `chosen`.
    """
    found: ResolvedPlugins = {}
    for selection in selections(config):
        family = selection.family
        path = tuple((family.name_path or family.key).split("."))
        if path in (("grammar", "options", "fallback"), ("speculation", "first")):
            continue
        if selection.name != AUTO:
            try:
                provider: Provider[Any] | None = registry.find(family.key, selection.name, family.name_path)
            except UnknownProviderError:  # the code that creates the provider raises this error again
                continue
            source = origin_of(path, config.origins).source if path in config.origins else ""
            why = f"{family.name_path}: {source}" if source else f"{family.name_path}: the default"
        elif family.key in chosen:
            provider = chosen[family.key]
            why = f"auto: {_reason(family.key, provider, device, chat_template)}"
        elif family.key in ("model", "attention", "media", "tool_calls", "reasoning", "executor"):
            continue
        else:
            provider = next(iter(registry.available(family.key)), None)
            why = "auto: the highest rank that runs on this machine"
        if provider is not None:
            found[family.key] = {"name": provider.name, "distribution": registry.distribution(provider), "why": why}
    if config.parallel.data == 1:
        found.pop("routing_policy", None)  # there is nothing to choose
    if "drafter" in found:
        drafters = configured_drafters(config, registry)
        distributions = dict.fromkeys(registry.distribution(drafter) for drafter in drafters)
        found["drafter"] |= {
            "name": ", ".join(drafter.name for drafter in drafters),
            "distribution": ", ".join(distributions),
        }
    return found


def _reason(family: str, provider: Provider[Any] | None, device: str, chat_template: str) -> str:
    if family not in ("tool_calls", "reasoning"):
        return f"the highest rank that fits {device}"
    if provider is not None and template_misfit(chat_template)(provider) is not None:
        return "the highest rank, because no format fits the chat template"
    return "the highest rank that fits the chat template"


def resolved_line(resolved: ResolvedPlugins) -> str:
    """Return the providers as one line for the log."""
    return "resolved: " + ", ".join(f"{family}={one['name']} ({one['why']})" for family, one in resolved.items())
