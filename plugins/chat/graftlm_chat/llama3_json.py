"""The tool call format `llama3_json`: an answer that consists only of calls."""

from collections.abc import Sequence
from typing import Final

from graftlm.contracts import CallGrammar, Tool, ToolCall, ToolCallFormat, ToolCallParser, ToolChoice
from graftlm_chat.call_grammars import call_head, tagged_calls
from graftlm_chat.json_call_parser import JsonCallParser
from graftlm_chat.markup import Markup, Word
from graftlm_chat.wording import describe_tools

__all__ = ["Llama3JsonFormat"]

_KEY: Final = "parameters"
_MARKUP: Final = Markup(marker="<|python_tag|>", is_bare=True, separator=(Word(";", is_optional=True),))
_HOW: Final = (
    'To call one, answer with nothing but a JSON object: {"name": "...", "parameters": {...}}. '
    "Put ; between several of them."
)


class Llama3JsonFormat(ToolCallFormat):
    """Calls are {"name": ..., "parameters": {...}}, separated by `;`. The special token <|python_tag|> is optional."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion."""
        return JsonCallParser(_MARKUP, tools, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return a structural tag. It has no marker; the start of an object with a tool's name is the trigger."""
        return tagged_calls(tools, choice, parallel=parallel, key=_KEY)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls, separated by `;`."""
        return "; ".join(f"{call_head(call.name, _KEY)}{call.arguments}}}" for call in calls)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the objects."""
        return describe_tools(tools, _HOW)
