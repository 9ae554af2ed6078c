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
        vocab_size: V, columns of the logits; may exceed the tokenizer's, or fall short of it.
        stop_token_ids: the tokens that end a complete output; at least one.
    """

    tokenizer_json: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]


class GrammarMatcher(ABC):
    """One request's place in a grammar. Used by one thread at a time.

    Invariants:
        - A token whose bit `fill_bitmask` sets is accepted by `accept`; a token whose bit is clear is not.
        - Stop tokens are allowed where the output so far is complete, and nowhere else; once one has been accepted the
          matcher is finished, and allows nothing.
        - Special tokens are never text: no grammar allows them, but for stop tokens.
        - After `rollback(n)` the matcher answers as it did n accepted tokens ago, a stop token among them included.
        - `fill_bitmask`, `forced_text` and `forced_tokens` accept nothing: what is asked afterwards is answered alike.
    """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance over a token; False leaves the matcher unchanged."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the latest accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row], and change no other row.

        Args:
            mask: int32 [B, ceil(V / 32)], C-contiguous, with anything in it; bit i of word w is token 32 w + i. Bits
                past V are cleared.
        """

    @abstractmethod
    def forced_text(self) -> str:
        """Return the text that must come next, "" if there is a choice."""

    @abstractmethod
    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that must come next whatever is sampled, in order, empty if there is a choice.

        Where they never end, some of them are returned.
        """

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
        - `check` and `compile` may be called from several threads at once, and never run on the step loop.
        - A specification that cannot be enforced in full is refused, never partly ignored: whatever a matcher accepts
          up to a stop token meets the specification. (It need not accept all that does.)
        - What `check` refuses, `compile` refuses; nothing malformed makes either fail otherwise.
        - Matchers of one compiled grammar know nothing of each other.
    """

    @abstractmethod
    def check(self, spec: GrammarSpec) -> None:
        """Refuse what can be refused without compiling, in milliseconds.

        Raises:
            GrammarError: the specification is malformed, or asks for what this backend cannot enforce; the message says
                where.
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a specification. Slow.

        Raises:
            GrammarError: as of `check`.
        """
