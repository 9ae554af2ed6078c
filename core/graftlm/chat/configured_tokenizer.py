"""Loads the tokenizer of a checkpoint, with the chat template of the configuration."""

from pathlib import Path

from graftlm.config import EngineConfig
from graftlm.errors import ConfigError, InvalidPromptError
from graftlm.tokenization import Tokenizer

__all__ = ["load_tokenizer", "read_chat_template"]


def load_tokenizer(config: EngineConfig, path: Path) -> Tokenizer:
    """Return the tokenizer of a configuration.

    Args:
        path: the checkpoint, a folder or a GGUF file.

    Raises:
        CheckpointError: the checkpoint has no tokenizer that can be used.
        ConfigError: the file `chat.template` cannot be read, or has an error in Jinja's syntax.
    """
    template = read_chat_template(config)
    tokenizer = Tokenizer.load(path, trust_remote_code=config.model.trust_remote_code, chat_template=template)
    if template is not None:
        _check_syntax(tokenizer, f"chat.template: {config.chat.template}")
    return tokenizer


def read_chat_template(config: EngineConfig) -> str | None:
    """Return the text of the file `chat.template`; None if the checkpoint's chat template is used.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if config.chat.template is None:
        return None
    file = Path(config.chat.template).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat.template: cannot read {file}: {reason}") from error
    if not text.strip():
        raise ConfigError(f"chat.template: {file} is empty")
    return text


def _check_syntax(tokenizer: Tokenizer, what: str) -> None:
    """Raise a ConfigError if Jinja cannot parse the chat template. A template may refuse the messages of the check."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    except InvalidPromptError as error:
        if isinstance(cause := error.__cause__, TemplateSyntaxError):
            raise ConfigError(f"{what}:{cause.lineno}: {cause.message}") from error
