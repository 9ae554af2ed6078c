"""The formats of tool calls and reasoning in chats."""
