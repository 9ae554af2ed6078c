"""Reads prompts from a JSONL file."""

from array import array
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from graftlm.bench.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, WorkItem
from graftlm.errors import ConfigError

__all__ = ["read_dataset"]

_Count = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

#: Maximum number of reported errors; a file in a wrong format would have thousands of errors.
_MAX_ERRORS: Final = 10


class _Line(msgspec.Struct, frozen=True):
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    input_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)] | None = None
    max_tokens: _Count | None = None
    output_tokens: _Count | None = None


def read_dataset(path: Path, max_prompts: int | None, output_tokens: int, accepts: tuple[type, ...]) -> list[WorkItem]:
    """Read requests from a file, in order.

    A line is an object with one of "prompt" (text), "messages" (a chat) and "input_ids" (token ids). It may also have
    "max_tokens" or its synonym "output_tokens". Other keys and empty lines are ignored.

    Args:
        max_prompts: maximum number of prompts to read; None: read the whole file.
        output_tokens: maximum number of tokens to generate, for lines without a maximum.
        accepts: the forms of prompts that the API accepts.

    Raises:
        ConfigError: the file cannot be read, has no prompts, or has wrong lines. The message has a line
            "file:line: error" for each of the first 10 wrong lines.
    """
    items: list[WorkItem] = []
    errors: list[str] = []
    for number, line in islice(_lines(path), max_prompts):
        try:
            items.append(_item(line, output_tokens, accepts))
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}")
            if len(errors) == _MAX_ERRORS:
                break
    if errors:
        raise ConfigError("\n".join(errors))
    if not items:
        raise ConfigError(f"{path} contains no prompts; expected one JSON object per line")
    return items


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, content) of lines that are not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from error


def _item(data: bytes, output_tokens: int, accepts: tuple[type, ...]) -> WorkItem:
    """Return the request in a line.

    Raises:
        ValueError: the line is wrong.
    """
    raw = msgspec.json.decode(data)
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object, got {type(raw).__name__}")
    _refuse_misspelt(raw)
    line = msgspec.convert(raw, _Line)
    if line.max_tokens is not None and line.output_tokens is not None:
        raise ValueError("has both max_tokens and output_tokens, which mean the same; remove one of them")
    prompt = _prompt(line)
    if not isinstance(prompt, accepts):
        raise ValueError(_WRONG_FORM[type(prompt)])
    return WorkItem(prompt, line.max_tokens or line.output_tokens or output_tokens)


def _prompt(line: _Line) -> Prompt:
    forms = ("prompt", "messages", "input_ids")
    given = [form for form in forms if getattr(line, form) is not None]
    if len(given) != 1:
        raise ValueError(f"expected one of {', '.join(forms)}, got {' and '.join(given) or 'none'}")
    if line.prompt is not None:
        return TextPrompt(line.prompt)
    if line.input_ids is not None:
        return TokenPrompt(array("i", line.input_ids))
    messages = line.messages or []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] has no role")
    return ChatPrompt(messages)


def _refuse_misspelt(raw: dict[str, Any]) -> None:
    """Refuse a key that is probably a misspelt known key; without an error, its value would be ignored.

    Raises:
        ValueError: there is such a key.
    """
    for key in raw.keys() - set(_Line.__struct_fields__):
        close = get_close_matches(key, _Line.__struct_fields__, n=1, cutoff=0.8)
        if close and close[0] not in raw:
            raise ValueError(f"unknown key {key!r}; did you mean {close[0]!r}?")


_WRONG_FORM: Final[dict[type, str]] = {
    ChatPrompt: "messages can only be sent with --api openai-chat",
    TokenPrompt: "input_ids can only be sent with --api native or openai-completions",
}
