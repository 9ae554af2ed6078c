"""The contract of a grammar backend: specifications to compiled grammars to per-request matchers."""

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


#: Texts of a choice at most: xgrammar compiles these in 1.5 s, and 50,000 in 17 s and 1 GB.
MAX_CHOICES: Final = 10_000


class GrammarOptions(Options):
    """Options that every grammar backend has; a backend's own derive from these."""

    fallback: Annotated[
        tuple[str, ...],
        Field(description="Backends, with their default options, that get what this one refuses, the first that can."),
    ] = ()


class GrammarKind(str, Enum):
    """The language a grammar specification is written in.

    `CHOICE` is a JSON list of up to `MAX_CHOICES` strings, of which the output is one. `STRUCTURAL_TAG` is free text
    with constrained parts, a JSON object:

        {"triggers": ["<function="],
         "structures": [{"begin": "<function=get_weather>", "schema": {...}, "end": "</function>"}, ...],
         "at_least_one": false, "stop_after_first": false}

    Where the output contains a trigger, it goes on as one of the structures whose `begin` starts with that trigger:
    the rest of `begin`, JSON that meets `schema` (or, in its place, text that matches `regex`), `end`; then text is
    free again. Each `begin` starts with a trigger. With `at_least_one` the output starts with
    a structure, without text before; with `stop_after_first` it ends after one.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What to enforce, as text. Equal ones share a compilation.

    Attributes:
        strict: refuse what cannot be enforced in full. Otherwise the parts of a JSON schema that cannot be enforced,
            and nothing else, are left out, and `check` names them.
    """

    kind: GrammarKind
    text: str
    strict: bool = True


def run_here(call: Callable[[], Any]) -> Any:
    """Run a call and return what it returns."""
    return call()


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a backend is created with.

    Attributes:
        tokenizer_json: the `tokenizers` library's serialisation of the tokenizer.
        vocab_size: V, columns of the logits; may exceed the tokenizer's, or fall short of it.
        stop_token_ids: the tokens that end a complete output; at least one.
        run_idle: runs a long call into native code, one that lets go of the interpreter's lock, so that it does not
            take cores from the step loop; returns what the call returns.
    """

    tokenizer_json: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    run_idle: Callable[[Callable[[], Any]], Any] = run_here


class GrammarMatcher(ABC):
    """One request's place in a grammar. Used by one thread at a time.

    Invariants:
        - A token whose bit `fill_bitmask` sets is accepted by `accept`; a token whose bit is clear is not.
        - Stop tokens are allowed where the output so far is complete, and nowhere else; once one has been accepted the
          matcher is finished, and allows nothing.
        - Special tokens are never text: no grammar allows them, but for stop tokens.
        - After `rollback(n)` the matcher answers as it did n accepted tokens ago, a stop token among them included.
        - `fill_bitmask`, `forced_text` and `forced_tokens` accept nothing: what is asked afterwards is answered alike.
        - A mask belongs to the caller: a matcher keeps no view of it, and writes into it during `fill_bitmask` only.
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
        - A strict specification that cannot be enforced in full is refused, never partly ignored: whatever a matcher
          accepts up to a stop token meets the specification. (It need not accept all that does.)
        - What of a specification that is not strict is not enforced is named by `check`.
        - What `check` refuses, `compile` refuses; nothing malformed makes either fail otherwise.
        - Matchers of one compiled grammar know nothing of each other.
    """

    @abstractmethod
    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Refuse what can be refused without compiling, in milliseconds.

        Returns: what is not enforced, each keyword with its path, such as `$.items.uniqueItems`; empty when the
            specification is strict.

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

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the tokens that each of several matchers allows: those of matchers[i] into mask[i].

        A backend that can do that in several threads overrides this; a step's forward pass runs beside it.

        Args:
            matchers: of this backend, each once.
            mask: int32 [len(matchers), ceil(V / 32)], as in `GrammarMatcher.fill_bitmask`.
        """
        for i, matcher in enumerate(matchers):
            matcher.fill_bitmask(mask, i)
