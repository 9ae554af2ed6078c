"""The base of the backends that call a provider's Python library."""

from collections.abc import Sequence
from types import ModuleType

from graftlm.errors import ConfigError, UnsupportedFeatureError
from graftlm.lang.backends.openai.api_backend import ApiBackend
from graftlm.lang.backends.openai.calls import Transport
from graftlm.lang.backends.openai.dialects import CHAT_TEXT_FORMAT, ChatDialect, ChatFeatures
from graftlm.lang.chat_template import ChatTemplate, find_template
from graftlm.lang.choices import ChoiceScore
from graftlm.types import Message

__all__ = ["LibraryBackend", "check_model", "library"]


class LibraryBackend(ApiBackend):
    """A Backend that answers chats, for which a transport calls a library.

    A program's text without chat messages is sent as one message of the user.
    """

    def __init__(
        self,
        model: str,
        transport: Transport,
        features: ChatFeatures,
        *,
        max_requests: int,
        chat_template: str | None = None,
    ) -> None:
        """Create the backend.

        Args:
            transport: calls the library.
            features: the properties of the API.
            max_requests: maximum number of active requests; further requests wait.
            chat_template: name of the template that formats chats in the program's text; None: `chatml`.
        """
        self._template = find_template(chat_template or CHAT_TEXT_FORMAT, model)
        dialect = ChatDialect(model, self._template, features)
        super().__init__(transport, dialect, max_requests=max_requests, continues_text=False)
        self._reports_logprobs = "return_logprob" not in features.lacking

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of the first tokens of each choice, along one answer; see Backend."""
        if not self._reports_logprobs:
            raise UnsupportedFeatureError(
                "select: this API reports no log-probabilities; use gen and compare its text with the choices"
            )
        if unconditional:
            raise UnsupportedFeatureError(
                "unconditional_likelihood_normalized: an endpoint cannot score tokens without their prompt; use "
                "another choices_method"
            )
        return await self._calls.path_scores(self._dialect, prompt, choices, messages)

    async def chat_template(self) -> ChatTemplate:
        """Return the format of chats in the program's text; the service gets messages, not this text; see Backend."""
        return self._template


def check_model(model: str) -> None:
    """Check the name of a model.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be the name of a model of the service, got {model!r}")


def library(name: str, backend: str) -> ModuleType:
    """Import the library of a backend.

    Args:
        name: the name of the library, which is also that of graftlm's extra.
        backend: the class that needs it, for the error.

    Raises:
        ConfigError: the library is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{backend} needs the package {name} ({error}). pip install 'graftlm[{name}]'") from error
