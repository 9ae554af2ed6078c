"""The tool call format: each call is <call>{"name": "f", "arguments": {"a": 1}}</call>."""

import json
from collections.abc import Sequence
from typing import Final

from graftlm.contracts import (
    CallGrammar,
    GrammarKind,
    GrammarSpec,
    Tool,
    ToolCall,
    ToolCallFormat,
    ToolCallParser,
    ToolChoice,
)

from graftlm_new_plugin.call_parser import TaggedCallParser

__all__ = ["BEGIN", "TaggedCalls"]

BEGIN: Final = "<call>"
END: Final = "</call>"


class TaggedCalls(ToolCallFormat):
    """A format in which calls are JSON between tags, anywhere in an answer."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion, which returns a call when the call is complete."""
        return TaggedCallParser([tool.name for tool in tools], BEGIN, END, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar:
        """Return a structural tag with the beginning of a call and the arguments' schema for each tool."""
        tag = {
            "triggers": [BEGIN],
            "structures": [
                {
                    "begin": f'{BEGIN}{{"name": {json.dumps(tool.name)}, "arguments": ',
                    "schema": tool.parameters,
                    "end": "}" + END,
                }
                for tool in tools
            ],
            "at_least_one": choice is ToolChoice.REQUIRED,
            "stop_after_first": not parallel,
        }
        strict = all(tool.strict for tool in tools)
        places = tuple(f"$.structures[{i}].schema" for i in range(len(tools)))
        return CallGrammar(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), strict=strict), places)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write calls in this format, one per line."""
        return "\n".join(
            f'{BEGIN}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}{END}' for call in calls
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and this format to a model."""
        known = "\n".join(
            json.dumps({"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)})
            for tool in tools
        )
        example = self.render([ToolCall("NAME", "{...}")])
        return f"You can call these functions:\n{known}\nTo call one, write: {example}"
