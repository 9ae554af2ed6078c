"""What a model is told of its tools where its chat template tells nothing."""

from collections.abc import Sequence

from graftlm.contracts import Tool
from graftlm_chat.json_text import dump

__all__ = ["describe_tools"]


def describe_tools(tools: Sequence[Tool], how: str) -> str:
    """List tools, one JSON object a line, and say how they are called."""
    lines = [
        dump(
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
        )
        for tool in tools
    ]
    return "\n".join(["You can call these functions:", "<tools>", *lines, "</tools>", how])
