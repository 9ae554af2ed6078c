"""What stands before and after each message of a chat, read off a template that writes whole chats."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, NoReturn

from graftlm.errors import ConfigError, InvalidPromptError, UnsupportedFeatureError
from graftlm.types import Message

__all__ = ["CHAT_TEMPLATES", "ChatTemplate", "find_template", "jinja_renderer"]

#: From messages, and whether the assistant's turn is to be opened behind them, to text.
Renderer = Callable[[Sequence[Message], bool], str]


class ChatTemplate:
    """Writes a chat piece by piece: what opens a message, and what closes it.

    A program appends to a message while it runs, so it needs the two apart. They are found by rendering a chat whose
    contents are marks; they depend on the roles so far (some templates put a default system message first), not on
    contents.
    """

    def __init__(self, render: Renderer, *, added_prefix: str = "") -> None:
        """Read from a renderer.

        Args:
            added_prefix: what the backend itself puts before each prompt; left out of the first opening.
        """
        self._render = render
        self._added_prefix = added_prefix
        self._known: dict[tuple[str, ...], tuple[str, str]] = {}

    def opening(self, roles: Sequence[str]) -> str:
        """Return what opens the last message of a chat of these roles.

        Raises:
            InvalidPromptError: the template refuses such a chat, or leaves the message out.
        """
        return self._affixes(tuple(roles))[0]

    def closing(self, roles: Sequence[str]) -> str:
        """Return what closes the last message of a chat of these roles; raises as `opening`."""
        return self._affixes(tuple(roles))[1]

    def text_of(self, messages: Sequence[Message]) -> str:
        """Return a chat as text, with its last message open; raises as `opening`."""
        text, roles = "", list[str]()
        for message in messages:
            text += self.closing(roles) if roles else ""
            roles.append(message["role"])
            text += self.opening(roles) + message["content"]
        return text

    def _affixes(self, roles: tuple[str, ...]) -> tuple[str, str]:
        if roles not in self._known:
            self._known[roles] = self._find_affixes(roles)
        return self._known[roles]

    def _find_affixes(self, roles: tuple[str, ...]) -> tuple[str, str]:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        last = len(roles) - 1
        whole = self._render(messages, False)
        before, found, closing = whole.rpartition(_mark(last))
        if not found:
            raise InvalidPromptError(
                f"the chat template leaves out a message of role {roles[-1]!r} behind {roles[:-1]}"
            )
        if last == 0:
            return before.removeprefix(self._added_prefix), closing
        if roles[-1] == "assistant":  # a model answers what the template opens for it, which may say more
            before = self._render(messages[:-1], True)
        between = before.rpartition(_mark(last - 1))[2]
        return _without(between, self.closing(roles[:-1])), closing


def _mark(index: int) -> str:
    return f"7c1d9e{index}f04b"


def _without(text: str, start: str) -> str:
    """Return a text without as much of `start` as it begins with."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, start, strict=False))
    return text[sum(1 for _ in equal) :]


def jinja_renderer(source: str, special_tokens: Mapping[str, str]) -> Renderer:
    """Return what renders a checkpoint's own template, as `transformers` would.

    Args:
        special_tokens: variables of the template, such as `bos_token`.

    Raises:
        ConfigError: it is no template.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        template = environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"not a Jinja template: {error}") from error

    def render(messages: Sequence[Message], opens_answer: bool) -> str:
        variables: dict[str, Any] = {"messages": messages, "add_generation_prompt": opens_answer}
        try:
            return template.render(**special_tokens, **variables)
        except TemplateError as error:
            raise InvalidPromptError(f"the chat template refuses these messages: {error}") from error

    return render


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat format that many models share.

    Attributes:
        models: a pattern that is searched for in a model's name.
    """

    source: str
    models: str


#: For servers that do not tell theirs. None of them writes a beginning-of-sequence token, which servers add.
CHAT_TEMPLATES: Final[Mapping[str, NamedTemplate]] = {
    "chatml": NamedTemplate(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        r"qwen|hermes|chatml",
    ),
    "llama-3": NamedTemplate(
        "{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        r"llama-?3.*(instruct|chat)",
    ),
    "gemma": NamedTemplate(
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{% if role == 'system' %}{{ raise_exception('gemma knows no system message') }}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        r"gemma.*it",
    ),
}


def find_template(name: str | None, model: str) -> ChatTemplate:
    """Return a template of CHAT_TEMPLATES.

    Args:
        name: its name; None looks for the one that fits the model's name.

    Raises:
        ConfigError: there is none of that name.
        UnsupportedFeatureError: no name is given, and none fits.
    """
    check_template_name(name)
    fitting = [key for key, template in CHAT_TEMPLATES.items() if re.search(template.models, model, re.IGNORECASE)]
    chosen = name or next(iter(fitting), None)
    if chosen is None:
        raise UnsupportedFeatureError(
            f"no chat template is known for model {model!r}; name one of {_known()} when making the endpoint, or write "
            "the roles as text"
        )
    return ChatTemplate(jinja_renderer(CHAT_TEMPLATES[chosen].source, {}))


def check_template_name(name: str | None) -> None:
    """Check that there is a template of a name; None leaves it open.

    Raises:
        ConfigError: there is none.
    """
    if name is not None and (not isinstance(name, str) or name not in CHAT_TEMPLATES):
        raise ConfigError(f"there is no chat template {name!r}; known are {_known()}")


def _known() -> str:
    return ", ".join(sorted(CHAT_TEMPLATES))
