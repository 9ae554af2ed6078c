"""A graftlm plugin: the tool call format `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import ChatFormatCapabilities, ChatFormatContext, NoOptions, ToolCallFormat

from graftlm_new_plugin.tagged_calls import BEGIN, TaggedCalls

__all__ = ["provide_tool_call_formats"]


def _create(options: NoOptions, context: ChatFormatContext) -> ToolCallFormat:
    return TaggedCalls()


@hookimpl
def provide_tool_call_formats() -> list[Provider[ToolCallFormat]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary=f"A JSON object for each call, after {BEGIN}",
            api_version=1,
            create=_create,
            options=NoOptions,
            capabilities=ChatFormatCapabilities(template_markers=(BEGIN,)),
        )
    ]
