"""Chat formats for graftlm: tool calls as `hermes`, `llama3_json`, `mistral` and `pythonic`; reasoning as `think`."""

from collections.abc import Iterable

from graftlm.contracts import ChatFormatCapabilities, Provider, ReasoningFormat, ToolCallFormat
from graftlm.hookspecs import hookimpl
from graftlm_chat.hermes import HermesFormat
from graftlm_chat.llama3_json import Llama3JsonFormat
from graftlm_chat.mistral import MistralFormat
from graftlm_chat.no_reasoning import NoReasoning
from graftlm_chat.pythonic import PythonicFormat
from graftlm_chat.think import ThinkFormat

__all__ = ["provide_reasoning_formats", "provide_tool_call_formats"]


def _tool_calls(
    name: str, kind: type[ToolCallFormat], summary: str, *markers: str, rank: int = 0
) -> Provider[ToolCallFormat]:
    return Provider(
        name=name,
        summary=summary,
        api_version=1,
        create=lambda options, context: kind(),
        capabilities=ChatFormatCapabilities(template_markers=markers),
        rank=rank,
    )


@hookimpl
def provide_tool_call_formats() -> Iterable[Provider[ToolCallFormat]]:
    """Return the providers of `hermes`, `llama3_json`, `mistral` and `pythonic`."""
    return [
        _tool_calls("hermes", HermesFormat, "<tool_call>{...}</tool_call>, as Hermes and Qwen", "<tool_call>", rank=10),
        _tool_calls("mistral", MistralFormat, "[TOOL_CALLS] and a JSON list, as Mistral", "[TOOL_CALLS]"),
        _tool_calls("llama3_json", Llama3JsonFormat, '{"name", "parameters"}, as Llama 3', "<|python_tag|>"),
        _tool_calls("pythonic", PythonicFormat, "[f(a=1), g()], as Llama 4 and Llama 3.2", "[func_name1("),
    ]


@hookimpl
def provide_reasoning_formats() -> Iterable[Provider[ReasoningFormat]]:
    """Return the providers of `think` and `none`."""
    return [
        Provider(
            name="think",
            summary="<think>...</think> before the answer, as DeepSeek R1 and Qwen 3",
            api_version=1,
            create=lambda options, context: ThinkFormat(),
            capabilities=ChatFormatCapabilities(template_markers=("<think>", "</think>")),
            rank=10,
        ),
        Provider(
            name="none",
            summary="Does not separate reasoning from the content",
            api_version=1,
            create=lambda options, context: NoReasoning(),
            capabilities=ChatFormatCapabilities(),
        ),
    ]
