"""A checkpoint's tokenizer, which converts text and chats to token ids, and token ids to text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graftlm.errors import CheckpointError, InvalidPromptError
from graftlm.tokenization.token_bytes import TokenBytes
from graftlm.tokenization.token_decoder import RustTokenDecoder
from graftlm.types import Message, TokenIds

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

_LINE_END: Final = "\n"
_CONFIG: Final = "tokenizer_config.json"
#: Names of the class that uses any tokenizer.json without changes.
_GENERIC_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_JSON_FILES: Final = ("tokenizer.json", _CONFIG, "special_tokens_map.json", "config.json")


class Tokenizer:
    """Encodes and decodes with the `tokenizers` library, and formats chats with the checkpoint's template.

    For text, only the Rust tokenizer inside the Hugging Face object is used: a call of that object changes the Rust
    tokenizer's truncation and padding, which is not thread-safe. Several threads may call all methods.
    """

    def __init__(self, pretrained: Any) -> None:
        """Wrap a Hugging Face tokenizer.

        Args:
            pretrained: a fast tokenizer (`PreTrainedTokenizerFast` or a subclass).

        Effects: disables padding and truncation of the Rust tokenizer.

        Raises:
            CheckpointError: the tokenizer does not use the `tokenizers` library.
        """
        if not getattr(pretrained, "is_fast", False):
            raise CheckpointError(
                f"{type(pretrained).__name__} is not a fast tokenizer; graftlm needs one that uses the tokenizers "
                "library. Convert the checkpoint's tokenizer to a tokenizer.json."
            )
        self._pretrained = pretrained
        self._core: tokenizers.Tokenizer = pretrained.backend_tokenizer
        self._core.no_padding()
        self._core.no_truncation()
        self._decoder = RustTokenDecoder(self._core)
        self._vocab_size = 1 + max(self._core.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Create a tokenizer from the result of `to_json`; it has no chat template.

        This needs neither the checkpoint nor Transformers, whose import takes seconds.

        Raises:
            CheckpointError: the text is not a serialized tokenizer.
        """
        import tokenizers

        try:
            return cls(_WithoutChats(tokenizers.Tokenizer.from_str(text)))
        except Exception as error:  # the library raises `Exception` itself
            raise CheckpointError(f"cannot read a serialized tokenizer: {_one_line(error)[:200]}") from error

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a checkpoint; nothing is downloaded.

        Args:
            path: the folder, or a GGUF file, whose metadata contain a tokenizer.
            trust_remote_code: whether Python code in the folder may run; if not, a tokenizer with code is an error.
            chat_template: a Jinja template that replaces the checkpoint's chat template; None: the checkpoint's.

        Raises:
            CheckpointError: a file is missing or broken (the message has its name), or the tokenizer is not a fast one.
        """
        pretrained = _load_any(path, trust_remote_code)
        if chat_template is not None:
            pretrained.chat_template = chat_template
        return cls(pretrained)

    @property
    def vocab_size(self) -> int:
        """The largest token id + 1; a model's logits may have more columns."""
        return self._vocab_size

    def to_json(self) -> str:
        """Return this tokenizer as JSON of the `tokenizers` library."""
        return self._core.to_str()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token; empty if the tokenizer has none."""
        eos = self._pretrained.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._pretrained.chat_template)

    @property
    def chat_template(self) -> str:
        """The Jinja chat template; "" if there is none. If there are several, the one for tools, else the default."""
        template = self._pretrained.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    @property
    def special_tokens(self) -> dict[str, str]:
        """The text of special tokens, by role: "bos_token", "eos_token" and so on."""
        return {name: str(text) for name, text in self._pretrained.special_tokens_map.items() if isinstance(text, str)}

    @property
    def prompt_prefix(self) -> str:
        """The text that `encode` adds before each text, such as the beginning-of-sequence token."""
        return self.decode(self.encode(""), skip_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n].

        Args:
            text: any text, also "".
            add_special_tokens: whether to add the checkpoint's tokens around a text, such as the beginning-of-sequence
                token.
        """
        return self._encode_one(text, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> TokenIds:
        """Return the token ids of a pair of texts, joined by the checkpoint's tokenizer, int32 [n]."""
        return self._encode_one((first, second), True)

    def _encode_one(self, text: str | tuple[str, str], add_special_tokens: bool) -> TokenIds:
        """Encode without the GIL and without character offsets, which only the batch call supports."""
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text inside another text, without the prefix that a tokenizer adds to texts."""
        if not self._marks_beginnings:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        before = self._core.encode(_LINE_END, add_special_tokens=False).ids
        return list(self._core.encode(_LINE_END + text, add_special_tokens=False).ids[len(before) :])

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether the first token of a text differs between the start of a text and a place after a line end."""
        letter, line, both = [
            self._core.encode(text, add_special_tokens=False).ids for text in ("a", _LINE_END, f"{_LINE_END}a")
        ]
        return both != line + letter

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Encode several texts on all cores; the results are those of `encode`."""
        encodings = self._core.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; invalid bytes become U+FFFD, unknown ids become ""."""
        return self._decoder.decode(token_ids, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` skips this token."""
        return self._decoder.is_special(token_id)

    def is_known(self, token_id: int) -> bool:
        """Return whether the vocabulary contains this id; a model's logits may have more columns."""
        return self._decoder.is_known(token_id)

    def token_of(self, text: str) -> int | None:
        """Return the token whose text is exactly `text`; None if there is none. Special tokens are never text."""
        token_id = self._core.token_to_id(text)
        is_text = token_id is not None and not self.is_special(token_id) and self.token_bytes(token_id) == text.encode()
        return token_id if is_text else None

    def is_special_text(self, text: str) -> bool:
        """Return whether a text is the name of a special token."""
        token_id = self._core.token_to_id(text)
        return token_id is not None and self.is_special(token_id)

    def most_characters(self, num_tokens: int) -> int | None:
        """Return the maximum number of characters of `num_tokens` tokens; None if there is no limit."""
        longest = self._longest_token
        return None if longest is None else num_tokens * longest

    @cached_property
    def _longest_token(self) -> int | None:
        """Maximum length of a token in characters; None if a token may replace any number of characters."""
        parts = json.loads(self.to_json())
        model = parts.get("model") or {}
        covers_everything = model.get("type") == "BPE" and (model.get("byte_fallback") or not model.get("unk_token"))
        if not covers_everything or parts.get("normalizer") is not None:
            return None
        return max(map(len, self._core.get_vocab(with_added_tokens=True)))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The function that returns the bytes of single tokens."""
        return TokenBytes(self.to_json(), self._core.id_to_token, lambda i: self.decode([i], skip_special_tokens=False))

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """Return the prompt of a chat as text.

        The template adds special tokens itself: encode the text with `add_special_tokens=False`, or use `encode_chat`.

        Args:
            messages: chat messages, oldest first.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            template_args: other variables of the template, such as `tools`.

        Raises:
            InvalidPromptError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidPromptError(
                "this checkpoint's tokenizer has no chat template; send the prompt as text, or set chat.template in "
                "the engine's configuration"
            )
        try:
            text = self._pretrained.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except Exception as error:  # a template is the checkpoint's code, and may raise any exception
            raise InvalidPromptError(f"the chat template refuses these messages: {_one_line(error)}") from error
        return str(text)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> TokenIds:
        """Return the prompt of a chat as token ids, int32 [n]; see `apply_chat_template`."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **template_args)
        return self.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _WithoutChats:
    """A substitute for a Hugging Face tokenizer that has only the Rust tokenizer."""

    backend_tokenizer: tokenizers.Tokenizer
    is_fast: bool = True
    eos_token_id: int | None = None
    chat_template: str | None = None
    special_tokens_map: dict[str, str] = field(default_factory=dict)


def _load_pretrained(path: Path, trust_remote_code: bool) -> Any:
    """Return a checkpoint's tokenizer as loaded by Transformers.

    `AutoTokenizer` imports the code of models, and with it torch and its compiler, to choose a class; that takes
    seconds. It also rebuilds the tokenizer of some families. Neither is needed if the checkpoint has the generic class,
    which uses tokenizer.json without changes.
    """
    if _names_generic_class(path):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def _load_any(path: Path, trust_remote_code: bool) -> Any:
    """Return the Hugging Face tokenizer of a folder or a GGUF file."""
    if path.is_file():
        return _load_from_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"cannot load a tokenizer from {path}: it is not a folder")
    try:
        return _load_pretrained(path, trust_remote_code)
    except Exception as error:  # the loader may raise any exception of its parsers
        raise CheckpointError(f"cannot load a tokenizer from {path}: {_load_error_reason(path, error)}") from error


def _load_from_gguf(file: Path) -> Any:
    """Return the tokenizer of a GGUF file as loaded by Transformers."""
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory(prefix="graftlm-") as folder:
        alone = Path(folder) / file.name  # tokenizer files in the original folder may belong to another model
        try:
            alone.symlink_to(file.resolve())
        except OSError:  # on Windows, only few users may create links
            shutil.copyfile(file, alone)
        try:
            made = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name, local_files_only=True)
        except Exception as error:  # the loader may raise any exception of its parsers
            raise CheckpointError(f"cannot load a tokenizer from {file}: {_one_line(error)[:200]}") from error
    return _without_classes_own_tokens(made)


def _without_classes_own_tokens(made: Any) -> Any:
    """Return a tokenizer without the tokens that Transformers' tokenizer class adds.

    The model has no embedding rows for them: the vocabulary of the file contains all tokens of the model.
    """
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    parts = json.loads(made.backend_tokenizer.to_str())
    num_tokens = made.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    own = [token for token in parts["added_tokens"] if token["id"] < num_tokens]
    if len(own) == len(parts["added_tokens"]):
        return made
    return PreTrainedTokenizerFast(
        tokenizer_object=Core.from_str(json.dumps(parts | {"added_tokens": own})),
        chat_template=made.chat_template,
        **{name: text for name, text in made.special_tokens_map.items() if isinstance(text, str)},
    )


def _names_generic_class(path: Path) -> bool:
    """Return whether a checkpoint's tokenizer class is the generic one, without Python code of the checkpoint."""
    file = path / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in config


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _load_error_reason(path: Path, error: Exception) -> str:
    for name in _JSON_FILES:
        file = path / name
        if not file.is_file():
            continue
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as broken:
            return f"{name} is not readable JSON: {broken}"
    if not (path / "tokenizer.json").is_file():
        return f"tokenizer.json is missing ({_one_line(error)[:200]})"
    return f"tokenizer.json is not a tokenizer ({_one_line(error)[:200]})"
