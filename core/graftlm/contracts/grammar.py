"""The contract of a grammar backend: specifications to compiled grammars to per-request matchers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarContext",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarSpec",
]


class GrammarKind(str, Enum):
    """The language a grammar specification is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What to enforce: a JSON schema, a regular expression or a grammar, as text. Equal ones share a compilation."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a backend is created with.

    Attributes:
        tokenizer_json: the `tokenizers` library's serialisation of the tokenizer.
        vocab_size: V, columns of the logits; may exceed the tokenizer's.
        stop_token_ids: tokens that may end a finished output.
    """

    tokenizer_json: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]


class GrammarMatcher(ABC):
    """One request's place in a grammar.

    Invariants:
        - A token whose bit `fill_bitmask` sets is accepted by `accept`; a token whose bit is clear is not.
        - After `rollback(n)` the matcher answers as it did n accepted tokens ago.
        - `forced_tokens` accepts nothing: it only says what must come.
    """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance over a token; False leaves the matcher unchanged."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the latest accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row]: int32 [B, ceil(V / 32)], bit i of word w is token 32 w + i."""

    @abstractmethod
    def forced_text(self) -> str:
        """Return the text that must come next, "" if there is a choice."""

    @abstractmethod
    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that must come next whatever is sampled, empty if there is a choice."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the grammar has been completed and a stop token accepted."""


class CompiledGrammar(ABC):
    """A grammar ready to match; immutable, shared by requests and threads."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """Return a fresh matcher at the start."""


class GrammarBackend(ABC):
    """Compiles specifications.

    Invariants:
        - `compile` may be called from several threads at once and is slow; it never runs on the step loop.
        - A specification that cannot be enforced in full is refused, never partly ignored.
    """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a specification.

        Raises:
            RequestError: the specification is malformed, or names a keyword this backend cannot enforce.
        """
