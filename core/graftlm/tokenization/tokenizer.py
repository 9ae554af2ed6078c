"""A checkpoint's tokenizer: text and chats to token ids, token ids to text."""

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
#: Names of the class that takes a tokenizer.json as it is.
_GENERIC_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_JSON_FILES: Final = ("tokenizer.json", _CONFIG, "special_tokens_map.json", "config.json")


class Tokenizer:
    """Encodes and decodes through the `tokenizers` library; chats through the checkpoint's template.

    Only the Rust tokenizer below the Hugging Face object is used for text: the object's own call changes that
    tokenizer's truncation and padding, which two threads may not do at once. All methods may be called from several
    threads.
    """

    def __init__(self, pretrained: Any) -> None:
        """Wrap a Hugging Face tokenizer.

        Args:
            pretrained: a fast one (`PreTrainedTokenizerFast` or a subclass).

        Effects: switches off the padding and truncation of its Rust tokenizer.

        Raises:
            CheckpointError: it is not backed by the `tokenizers` library.
        """
        if not getattr(pretrained, "is_fast", False):
            raise CheckpointError(
                f"{type(pretrained).__name__} is not a fast tokenizer; graftlm needs one backed by the tokenizers "
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
        """Make a tokenizer of what `to_json` of another returned; it knows texts and tokens, and no chats.

        Neither the checkpoint nor the library that reads it is needed, which takes seconds to import.

        Raises:
            CheckpointError: the text is not the serialisation of a tokenizer.
        """
        import tokenizers

        try:
            return cls(_WithoutChats(tokenizers.Tokenizer.from_str(text)))
        except Exception as error:  # the library raises `Exception` itself
            raise CheckpointError(f"cannot read a serialised tokenizer: {_one_line(error)[:200]}") from error

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Read the tokenizer of a checkpoint; nothing is downloaded.

        Args:
            path: the folder, or a GGUF file, whose metadata describe a tokenizer.
            trust_remote_code: whether Python code in the folder may run; a tokenizer that needs it fails otherwise.

        Raises:
            CheckpointError: a file is missing or broken (the message names it), or the tokenizer is not a fast one.
        """
        if path.is_file():
            return cls(_load_from_gguf(path))
        if not path.is_dir():
            raise CheckpointError(f"cannot load a tokenizer from {path}: it is not a folder")
        try:
            pretrained = _load_pretrained(path, trust_remote_code)
        except Exception as error:  # the loader raises whatever its parsers raise
            raise CheckpointError(f"cannot load a tokenizer from {path}: {_what_is_wrong(path, error)}") from error
        return cls(pretrained)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's logits may have more columns."""
        return self._vocab_size

    def to_json(self) -> str:
        """Return the `tokenizers` library's serialisation of this tokenizer."""
        return self._core.to_str()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token, or nothing if the tokenizer has none."""
        eos = self._pretrained.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat becomes a prompt."""
        return bool(self._pretrained.chat_template)

    @property
    def chat_template(self) -> str:
        """The chat template, in Jinja; "" when there is none. Of several, the one for tools, or else the default."""
        template = self._pretrained.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    @property
    def special_tokens(self) -> dict[str, str]:
        """The tokens with a part to play, as text: "bos_token", "eos_token" and so on."""
        return {name: str(text) for name, text in self._pretrained.special_tokens_map.items() if isinstance(text, str)}

    @property
    def prompt_prefix(self) -> str:
        """What `encode` puts before each text, such as the beginning-of-sequence token, as text."""
        return self.decode(self.encode(""), skip_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n].

        Args:
            text: anything, "" included.
            add_special_tokens: put tokens such as the beginning-of-sequence token around it, as the checkpoint says.
        """
        return self._encode_one(text, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> TokenIds:
        """Return the token ids of two texts as the checkpoint's tokenizer joins a pair, int32 [n]."""
        return self._encode_one((first, second), True)

    def _encode_one(self, text: str | tuple[str, str], add_special_tokens: bool) -> TokenIds:
        """Encode without the GIL, and without the characters' offsets, both of which only the batch call can do."""
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text that stands within another: without what a tokenizer puts before a beginning."""
        if not self._marks_beginnings:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        before = self._core.encode(_LINE_END, add_special_tokens=False).ids
        return list(self._core.encode(_LINE_END + text, add_special_tokens=False).ids[len(before) :])

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether a text's first token differs at the beginning from what it is after a line end."""
        letter, line, both = [
            self._core.encode(text, add_special_tokens=False).ids for text in ("a", _LINE_END, f"{_LINE_END}a")
        ]
        return both != line + letter

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Encode several texts on all cores; each result equals `encode`'s."""
        encodings = self._core.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character show as U+FFFD, unknown ids as nothing."""
        return self._decoder.decode(token_ids, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return self._decoder.is_special(token_id)

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary holds this id; a model's logits may have columns that it does not."""
        return self._decoder.is_known(token_id)

    def token_of(self, text: str) -> int | None:
        """Return the token that is all of a text; None if there is none but special ones, which are no text."""
        token_id = self._core.token_to_id(text)
        is_text = token_id is not None and not self.is_special(token_id) and self.token_bytes(token_id) == text.encode()
        return token_id if is_text else None

    def is_special_text(self, text: str) -> bool:
        """Whether a text is the name of a special token."""
        token_id = self._core.token_to_id(text)
        return token_id is not None and self.is_special(token_id)

    def most_characters(self, num_tokens: int) -> int | None:
        """Return how many characters of text so many tokens can stand for at most; None when there is no such bound."""
        longest = self._longest_token
        return None if longest is None else num_tokens * longest

    @cached_property
    def _longest_token(self) -> int | None:
        """The most characters a token stands for; None where an unknown token, or the normaliser, may swallow any."""
        parts = json.loads(self.to_json())
        model = parts.get("model") or {}
        covers_everything = model.get("type") == "BPE" and (model.get("byte_fallback") or not model.get("unk_token"))
        if not covers_everything or parts.get("normalizer") is not None:
            return None
        return max(map(len, self._core.get_vocab(with_added_tokens=True)))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Return what looks up the bytes of single tokens."""
        return TokenBytes(self.to_json(), self._core.id_to_token, lambda i: self.decode([i], skip_special_tokens=False))

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """Return a chat as the text of a prompt.

        The template writes its own special tokens: encode the text with `add_special_tokens=False`, or use
        `encode_chat`.

        Args:
            messages: oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_args: further variables of the template, such as `tools`.

        Raises:
            InvalidPromptError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidPromptError(
                "this checkpoint's tokenizer has no chat template; send the prompt as text, or add a chat_template "
                "to its tokenizer_config.json"
            )
        try:
            text = self._pretrained.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except Exception as error:  # a template is a program of the checkpoint's, run over what a user sent
            raise InvalidPromptError(f"the chat template refuses these messages: {_one_line(error)}") from error
        return str(text)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> TokenIds:
        """Return a chat as a prompt's token ids, int32 [n]; see `apply_chat_template`."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **template_args)
        return self.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _WithoutChats:
    """Stands for a Hugging Face tokenizer of which only the part in Rust is known."""

    backend_tokenizer: tokenizers.Tokenizer
    is_fast: bool = True
    eos_token_id: int | None = None
    chat_template: str | None = None
    special_tokens_map: dict[str, str] = field(default_factory=dict)


def _load_pretrained(path: Path, trust_remote_code: bool) -> Any:
    """Return a checkpoint's tokenizer as transformers makes it.

    To choose a class, `AutoTokenizer` reads the code of models and, with it, torch and its compiler, which takes
    seconds. Where the checkpoint names the class for any tokenizer.json, there is nothing to choose, and nothing in
    that file is made anew, as `AutoTokenizer` does for some families.
    """
    if _names_generic_class(path):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def _load_from_gguf(file: Path) -> Any:
    """Return the tokenizer that a GGUF file describes, as transformers makes it."""
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory(prefix="graftlm-") as folder:
        alone = Path(folder) / file.name  # tokenizer files beside it may be another model's
        try:
            alone.symlink_to(file.resolve())
        except OSError:  # Windows lets few users make links
            shutil.copyfile(file, alone)
        try:
            made = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name, local_files_only=True)
        except Exception as error:  # the loader raises whatever its parsers raise
            raise CheckpointError(f"cannot load a tokenizer from {file}: {_one_line(error)[:200]}") from error
    return _without_classes_own_tokens(made)


def _without_classes_own_tokens(made: Any) -> Any:
    """Return a tokenizer without the tokens that the class which transformers chose for it brings along.

    A model has no rows for them: the file lists all tokens of its model in the vocabulary itself.
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
    """Whether a checkpoint's tokenizer is the class for any tokenizer.json, and no code of its own."""
    file = path / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in config


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _what_is_wrong(path: Path, error: Exception) -> str:
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
