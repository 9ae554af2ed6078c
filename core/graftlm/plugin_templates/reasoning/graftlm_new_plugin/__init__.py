"""A graftlm plugin: the reasoning format `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import ChatFormatCapabilities, ChatFormatContext, NoOptions, ReasoningFormat

from graftlm_new_plugin.reasoning import BEGIN, TaggedReasoning

__all__ = ["provide_reasoning_formats"]


def _create(options: NoOptions, context: ChatFormatContext) -> ReasoningFormat:
    return TaggedReasoning()


@hookimpl
def provide_reasoning_formats() -> list[Provider[ReasoningFormat]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary=f"Reasoning after {BEGIN}, at the beginning of an answer",
            api_version=1,
            create=_create,
            options=NoOptions,
            capabilities=ChatFormatCapabilities(template_markers=(BEGIN,)),
        )
    ]
