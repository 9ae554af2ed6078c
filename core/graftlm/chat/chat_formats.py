"""Chooses the served model's formats of tool calls and reasoning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from graftlm.chat.guarded_formats import GuardedReasoningFormat, GuardedToolCallFormat
from graftlm.config import EngineConfig
from graftlm.contracts import ChatFormatContext, Provider, ReasoningFormat, ToolCallFormat
from graftlm.errors import ProviderUnavailableError
from graftlm.registry import AUTO, FAMILIES, Registry

__all__ = ["ChatFormats", "choose_chat_formats", "make_chat_formats", "template_misfit"]


#: Wrappers that convert a plugin's exception to a failure of the request, with the plugin's name.
_GUARDS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "tool_calls": GuardedToolCallFormat,
    "reasoning": GuardedReasoningFormat,
}


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """The chat formats of a checkpoint.

    Attributes:
        tool_calls: format of tool calls; None if no plugin provides one.
        reasoning: format of reasoning; None if all text is content.
        template_knows_tools: whether the chat template writes tools into the prompt; otherwise the server does.
    """

    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    template_knows_tools: bool = False


def make_chat_formats(config: EngineConfig, registry: Registry, chat_template: str) -> ChatFormats:
    """Return the configured formats; `auto` selects the format whose marker is in the chat template.

    If the template has no marker, `auto` selects the tool call format of the highest rank, and no reasoning format.

    Args:
        chat_template: the checkpoint's chat template; "" if it has none.

    Raises:
        PluginError: a format is not available or cannot be created.
    """
    context = ChatFormatContext(chat_template)
    providers = choose_chat_formats(config, registry, chat_template)

    def create(family: str) -> Any:
        provider = providers[family]
        if provider is None:
            return None
        who = f"the {FAMILIES[family].title} '{provider.name}'"
        return _GUARDS[family](registry.create(family, provider, {}, context), who)

    return ChatFormats(
        tool_calls=create("tool_calls"),
        reasoning=create("reasoning"),
        template_knows_tools="tools" in chat_template,
    )


def choose_chat_formats(
    config: EngineConfig, registry: Registry, chat_template: str
) -> dict[str, Provider[Any] | None]:
    """Return the provider of each family of formats. Arguments and errors are those of `make_chat_formats`."""

    def choose(family: str, name: str, *, falls_back: bool) -> Provider[Any] | None:
        provider = registry.provider(family, name) if name != AUTO else _marked(registry, family, chat_template)
        if provider is None and falls_back and registry.available(family):
            return registry.choose(family)
        return provider

    return {
        "tool_calls": choose("tool_calls", config.chat.tool_call_format, falls_back=True),
        "reasoning": choose("reasoning", config.chat.reasoning_format, falls_back=False),
    }


def _marked(registry: Registry, family: str, chat_template: str) -> Provider[Any] | None:
    """Return the provider of the highest rank whose marker is in the template; None if there is none."""
    try:
        return registry.choose(family, fits=template_misfit(chat_template))
    except ProviderUnavailableError:
        return None


def template_misfit(chat_template: str) -> Callable[[Provider[Any]], str | None]:
    """Return a function that returns why a provider's format does not match the chat template, or None."""

    def fits(provider: Provider[Any]) -> str | None:
        markers = provider.capabilities.template_markers
        return (
            None if any(marker in chat_template for marker in markers) else "the chat template has none of its markers"
        )

    return fits
