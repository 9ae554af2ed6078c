"""The tool call format `mistral`: an answer that is a list of calls."""

import secrets
import string
from collections.abc import Sequence
from typing import Final

from graftlm.contracts import CallGrammar, Tool, ToolCall, ToolCallFormat, ToolCallParser, ToolChoice
from graftlm_chat.call_grammars import call_head, call_list, tagged_calls
from graftlm_chat.json_call_parser import JsonCallParser
from graftlm_chat.markup import Markup, Word
from graftlm_chat.wording import describe_tools

__all__ = ["MistralFormat"]

_KEY: Final = "arguments"
_MARKUP: Final = Markup(
    marker="[TOOL_CALLS]", is_bare=True, opening=(Word("["),), separator=(Word(","),), closing=(Word("]"),)
)
_HOW: Final = 'To call some, answer with nothing but a JSON list: [{"name": "...", "arguments": {...}}, ...].'
_ID_LEN: Final = 9


class MistralFormat(ToolCallFormat):
    """Calls are [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]. The marker is an optional special token."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion."""
        return JsonCallParser(_MARKUP, tools, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return the schema of the list if calls are required, otherwise a structural tag of its objects."""
        if choice is ToolChoice.REQUIRED:
            return call_list(tools, parallel=parallel, key=_KEY)
        return tagged_calls(tools, choice, parallel=parallel, key=_KEY)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the list."""
        return f"[{', '.join(f'{call_head(call.name, _KEY)}{call.arguments}}}' for call in calls)}]"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the list."""
        return describe_tools(tools, _HOW)

    def new_id(self) -> str:
        """Return a random id of a call: nine letters and digits, which Mistral's chat templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LEN))
