"""The texts before and after each chat message, derived from a template that renders whole chats."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, NoReturn

from graftlm.errors import ConfigError, InvalidPromptError, UnsupportedFeatureError
from graftlm.types import Message

__all__ = ["CHAT_TEMPLATES", "ChatTemplate", "find_template", "jinja_renderer"]

#: Renders messages as text. If the second argument is True, the text also opens an assistant message at its end.
Renderer = Callable[[Sequence[Message], bool], str]


class ChatTemplate:
    """Returns the text that opens a chat message, and the text that closes it.

    A program appends to a message while it runs, so it needs the two texts separately. To find them, a chat is rendered
    with marks in place of the messages' contents; the text between the marks consists of closings and openings. Both
    depend on the roles of the earlier messages, because some templates add a default system message, but not on the
    contents of messages.
    """

    def __init__(self, render: Renderer, *, added_prefix: str = "") -> None:
        """Create a template.

        Args:
            render: renders a whole chat.
            added_prefix: text that the backend puts before each prompt; removed from the first opening.
        """
        self._render = render
        self._added_prefix = added_prefix
        self._affixes_of_roles: dict[tuple[str, ...], tuple[str, str]] = {}

    def opening(self, roles: Sequence[str]) -> str:
        """Return the text that opens the last message of a chat with these roles.

        Raises:
            InvalidPromptError: the template refuses such a chat, or omits the message.
        """
        return self._affixes(tuple(roles))[0]

    def closing(self, roles: Sequence[str]) -> str:
        """Return the text that closes the last message of a chat with these roles; raises like `opening`."""
        return self._affixes(tuple(roles))[1]

    def text_of(self, messages: Sequence[Message]) -> str:
        """Return a chat as text, with its last message open; raises like `opening`."""
        text, roles = "", list[str]()
        for message in messages:
            text += self.closing(roles) if roles else ""
            roles.append(message["role"])
            text += self.opening(roles) + message["content"]
        return text

    def _affixes(self, roles: tuple[str, ...]) -> tuple[str, str]:
        if roles not in self._affixes_of_roles:
            self._affixes_of_roles[roles] = self._find_affixes(roles)
        return self._affixes_of_roles[roles]

    def _find_affixes(self, roles: tuple[str, ...]) -> tuple[str, str]:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        last = len(roles) - 1
        whole = self._render(messages, False)
        before, found, closing = whole.rpartition(_mark(last))
        if not found:
            raise InvalidPromptError(
                f"the chat template omits a message of role {roles[-1]!r} after the roles {roles[:-1]}"
            )
        if last == 0:
            return before.removeprefix(self._added_prefix), closing
        if roles[-1] == "assistant":  # the opening of a new answer may differ from that of an earlier answer
            before = self._render(messages[:-1], True)
        between = before.rpartition(_mark(last - 1))[2]
        return _without(between, self.closing(roles[:-1])), closing


def _mark(index: int) -> str:
    return f"7c1d9e{index}f04b"


def _without(text: str, start: str) -> str:
    """Return a text without the longest prefix that it shares with `start`."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, start, strict=False))
    return text[sum(1 for _ in equal) :]


def jinja_renderer(source: str, special_tokens: Mapping[str, str]) -> Renderer:
    """Return a renderer of a checkpoint's own template, with the same result as `transformers`.

    Args:
        special_tokens: variables of the template, such as `bos_token`.

    Raises:
        ConfigError: the source is no Jinja template.
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
    """A chat format of several models.

    Attributes:
        models: regular expression; the format is used for models whose name matches it.
    """

    source: str
    models: str


#: For servers that do not report a template. These texts have no beginning-of-sequence token, because servers add it.
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
        "{% if role == 'system' %}{{ raise_exception('gemma has no system messages') }}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        r"gemma.*it",
    ),
}


#: SGLang's name of a template -> the name in CHAT_TEMPLATES.
_ALIASES: Final = {"llama-3-instruct": "llama-3", "gemma-it": "gemma"}


def find_template(name: str | None, model: str) -> ChatTemplate:
    """Return a template of CHAT_TEMPLATES.

    Args:
        name: name of the template; None selects one by the model's name.

    Raises:
        ConfigError: there is no template of that name.
        UnsupportedFeatureError: no name is given, and no template matches the model's name.
    """
    check_template_name(name)
    name = name if name is None else _ALIASES.get(name, name)
    fitting = [key for key, template in CHAT_TEMPLATES.items() if re.search(template.models, model, re.IGNORECASE)]
    chosen = name or next(iter(fitting), None)
    if chosen is None:
        raise UnsupportedFeatureError(
            f"no chat template is known for model {model!r}; pass chat_template=..., one of {_template_names()}, to "
            "the backend, or write the roles as text"
        )
    return ChatTemplate(jinja_renderer(CHAT_TEMPLATES[chosen].source, {}))


def check_template_name(name: str | None) -> None:
    """Check that a template of this name exists; None is accepted.

    Raises:
        ConfigError: there is no such template.
    """
    if name is not None and (not isinstance(name, str) or _ALIASES.get(name, name) not in CHAT_TEMPLATES):
        raise ConfigError(f"there is no chat template {name!r}; the names are {_template_names()}")


def _template_names() -> str:
    return ", ".join(sorted(CHAT_TEMPLATES))
