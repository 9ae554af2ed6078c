"""The tool call format `hermes`: each call is in its own pair of tags."""

from collections.abc import Sequence
from typing import Final

from graftlm.contracts import CallGrammar, Tool, ToolCall, ToolCallFormat, ToolCallParser, ToolChoice
from graftlm_chat.call_grammars import call_head, tagged_calls
from graftlm_chat.json_call_parser import JsonCallParser
from graftlm_chat.markup import Markup, Word
from graftlm_chat.wording import describe_tools

__all__ = ["HermesFormat"]

_KEY: Final = "arguments"
_OPEN: Final = "<tool_call>\n"
_CLOSE: Final = "\n</tool_call>"
_MARKUP: Final = Markup(marker="<tool_call>", closing=(Word("</tool_call>"),))
_HOW: Final = (
    "To call one, write a JSON object with its name and arguments in tags:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)


class HermesFormat(ToolCallFormat):
    """Calls are <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion."""
        return JsonCallParser(_MARKUP, tools, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return a structural tag whose trigger is <tool_call>."""
        return tagged_calls(tools, choice, parallel=parallel, key=_KEY, opening=_OPEN, closing=_CLOSE)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write each call in its tags."""
        return "\n".join(f"{_OPEN}{call_head(call.name, _KEY)}{call.arguments}}}{_CLOSE}" for call in calls)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the tags."""
        return describe_tools(tools, _HOW)
