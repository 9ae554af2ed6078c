"""Describes tools to models whose chat template does not include tools."""

from collections.abc import Sequence

from graftlm.contracts import Tool
from graftlm_chat.json_text import dump

__all__ = ["describe_tools"]


def describe_tools(tools: Sequence[Tool], how: str) -> str:
    """Return a prompt that lists tools, one JSON object per line, and explains how to call them.

    Args:
        tools: the tools.
        how: the explanation of the call format.
    """
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
