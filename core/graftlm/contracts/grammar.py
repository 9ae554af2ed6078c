"""The contract of a grammar backend, which compiles specifications and creates a matcher for each request."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftlm.contracts.provider import Options

__all__ = [
    "MAX_CHOICES",
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarContext",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarOptions",
    "GrammarSpec",
]


#: Maximum number of texts of a choice. xgrammar compiles 10,000 texts in 1.5 s, and 50,000 texts in 17 s with 1 GB of
#: memory.
MAX_CHOICES: Final = 10_000


class GrammarOptions(Options):
    """Options of every grammar backend; a backend's own options class derives from this one."""

    fallback: Annotated[
        tuple[str, ...],
        Field(
            description="Names of other backends for specifications that this backend refuses. The first of them "
            "that accepts a specification compiles it, with its default options."
        ),
    ] = ()


class GrammarKind(str, Enum):
    """The language of a grammar specification.

    `CHOICE` is a JSON list of up to `MAX_CHOICES` strings; the output is one of them. `STRUCTURAL_TAG` is a JSON object
    that describes free text with constrained parts:

        {"triggers": ["<function="],
         "structures": [{"begin": "<function=get_weather>", "schema": {...}, "end": "</function>"}, ...],
         "at_least_one": false, "stop_after_first": false}

    After a trigger, the output must continue as one of the structures whose `begin` starts with that trigger: the rest
    of `begin`, then JSON that conforms to `schema`, then `end`. A structure may have `regex` instead of `schema`; its
    text must match the expression. After `end`, text is free again. Each `begin` must start with a trigger. With
    `at_least_one`, the output starts with a structure. With `stop_after_first`, the output ends after the first
    structure.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar specification as text. Equal specifications share one compilation.

    Attributes:
        strict: whether a specification that cannot be enforced in full is refused. If False, keywords of a JSON schema
            that cannot be enforced are ignored, and `check` returns these keywords.
    """

    kind: GrammarKind
    text: str
    strict: bool = True


def run_here(call: Callable[[], Any]) -> Any:
    """Run a call and return its result."""
    return call()


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """The arguments of a backend's `create`.

    Attributes:
        tokenizer_json: the tokenizer in the JSON format of the `tokenizers` library.
        vocab_size: V, number of columns of the logits; it may be larger or smaller than the tokenizer's vocabulary.
        stop_token_ids: tokens that end a complete output; at least one.
        run_idle: function that runs a long native call and returns its result. The call must release the GIL. It runs
            with a low priority and takes no CPU time from the step loop.
    """

    tokenizer_json: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    run_idle: Callable[[Callable[[], Any]], Any] = run_here


class GrammarMatcher(ABC):
    """The state of one request's output in a grammar. It is not used by two threads at the same time.

    Invariants:
        - `accept` accepts a token if and only if `fill_bitmask` sets its bit.
        - Stop tokens are allowed only if the output so far is complete. After a stop token was accepted, the matcher is
          finished and allows no token.
        - A grammar does not allow special tokens, except stop tokens.
        - `rollback(n)` restores the state from before the last n accepted tokens, which may include a stop token.
        - `fill_bitmask`, `forced_text` and `forced_tokens` do not change the state.
        - The caller owns the mask. A matcher stores no view of the mask, and writes to it only during `fill_bitmask`.
    """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns: whether the token is allowed; if not, the matcher is unchanged."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the mask of the allowed tokens to mask[row]. Other rows are not changed.

        Args:
            mask: int32 [B, ceil(V / 32)], C-contiguous; its old content has no effect. Bit i of word w is token 32 w +
                i. Bits past V are cleared.
        """

    @abstractmethod
    def forced_text(self) -> str:
        """Return the text that the grammar forces next; "" if the next character is not forced."""

    @abstractmethod
    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens that the grammar forces, in order; empty if the next token is not forced.

        If the sequence of forced tokens is infinite, a first part of it is returned.
        """

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output is complete and a stop token was accepted."""


class CompiledGrammar(ABC):
    """A compiled grammar. It is immutable; requests and threads share it."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""


class GrammarBackend(ABC):
    """Compiles grammar specifications.

    Invariants:
        - Several threads may call `check` and `compile` at the same time. The step loop never calls them.
        - A strict specification that cannot be enforced in full is refused. Every output that a matcher accepts with a
          stop token therefore conforms to a strict specification. A matcher need not accept all conforming outputs.
        - `check` returns the keywords of a non-strict specification that are not enforced.
        - `compile` refuses every specification that `check` refuses. Malformed specifications raise only
          `GrammarError`.
        - Matchers of one compiled grammar are independent.
    """

    @abstractmethod
    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check a specification as far as possible without compiling it; this takes milliseconds.

        Returns: the path of each keyword that is not enforced, such as `$.items.uniqueItems`; empty if the
            specification is strict.

        Raises:
            GrammarError: the specification is malformed, or contains a part that this backend cannot enforce; the
                message has the path of the part.
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a specification; this may take long.

        Raises:
            GrammarError: the same cases as in `check`.
        """

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the mask of the allowed tokens of matchers[i] to mask[i], for each i.

        The call runs in parallel with a step's forward pass. Override this method if the backend can use several
        threads.

        Args:
            matchers: matchers of this backend, each at most once.
            mask: int32 [len(matchers), ceil(V / 32)], as in `GrammarMatcher.fill_bitmask`.
        """
        for i, matcher in enumerate(matchers):
            matcher.fill_bitmask(mask, i)
