"""How a model writes tool calls and reasoning in a chat."""
