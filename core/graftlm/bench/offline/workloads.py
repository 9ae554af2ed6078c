"""The workloads for measurements of an engine in its own process."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from graftlm.engine.engine import Engine
from graftlm.types import RequestOutput, SamplingParams

__all__ = ["DEFAULT_WORKLOADS", "WORKLOADS", "Prompts", "Size", "Workload"]

#: Smallest token id in prompts: in many tokenizers, the smaller ids are special tokens.
_FIRST_TOKEN_ID: Final = 300
_FULL_CONTEXT: Final = 1104

#: A regular expression that forces most characters, like the JSON schemas of typical programs.
_RECORD: Final = (
    r'\{"registration_number": [0-9]{6}, "is_active_member": (true|false), "preferred_language": "(en|de|fr)"\}'
)
#: Maximum number of tokens in a record, reached if each byte is a token.
_RECORD_TOKENS: Final = 100


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a workload, relative to its full size.

    Attributes:
        requests: factor for the number of requests.
        lengths: factor for the lengths of prompts and outputs, at most 1.
    """

    requests: float
    lengths: float

    @classmethod
    def of(cls, scale: float, context_len: int) -> "Size":
        """Return the size with `scale` as the factor for requests, and lengths that fit into the model's context."""
        return cls(scale, min(1.0, context_len / _FULL_CONTEXT))

    def count(self, full: int) -> int:
        """Return the number of requests for a workload that has `full` requests at full size; at least 1."""
        return max(1, round(full * self.requests))

    def tokens(self, full: int) -> int:
        """Return the number of tokens for a prompt or output that has `full` tokens at full size; at least 2."""
        return max(2, int(full * self.lengths))


class Prompts:
    """A generator of random prompts. The same seed gives the same prompts."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._token_ids = range(min(_FIRST_TOKEN_ID, vocab_size // 2), vocab_size)

    def draw(self, num_tokens: int) -> list[int]:
        """Return random token ids."""
        return self._random.choices(self._token_ids, k=num_tokens)

    def between(self, low: int, high: int) -> int:
        """Return a random number from `low` to `high`, both included."""
        return self._random.randint(low, high)


def _fixed(num_tokens: int) -> SamplingParams:
    """Return sampling parameters with which a request generates exactly `num_tokens` tokens, greedily."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _shared_prefix(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    common = prompts.draw(size.tokens(1024))
    requests = [common + prompts.draw(size.tokens(64)) for _ in range(size.count(64))]
    return engine.generate(requests, _fixed(size.tokens(16)), progress=False)


def _multi_turn(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    histories: list[list[int]] = [[] for _ in range(size.count(8))]
    outputs: list[RequestOutput] = []
    for _ in range(4):
        histories = [history + prompts.draw(size.tokens(128)) for history in histories]
        turn = engine.generate(histories, _fixed(size.tokens(64)), progress=False)
        histories = [history + list(output.token_ids) for history, output in zip(histories, turn, strict=True)]
        outputs += turn
    return outputs


def _unshared(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    count = size.count(32)
    requests = [prompts.draw(prompts.between(size.tokens(64), size.tokens(512))) for _ in range(count)]
    params = [_fixed(prompts.between(size.tokens(16), size.tokens(128))) for _ in range(count)]
    return engine.generate(requests, params, progress=False)


def _single_stream(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    outputs = []
    for _ in range(size.count(3)):
        *_, last = engine.stream(prompts.draw(size.tokens(512)), _fixed(size.tokens(128)))
        outputs.append(last)
    return outputs


def _structured(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    requests = [prompts.draw(size.tokens(256)) for _ in range(size.count(16))]
    params = SamplingParams(temperature=0, max_tokens=_RECORD_TOKENS, regex=_RECORD)
    return engine.generate(requests, params, progress=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests to an engine.

    Attributes:
        summary: description for users.
        run: runs the requests and returns their outputs.
        has_grammar: whether the requests have a grammar and so need a grammar backend.
    """

    summary: str
    run: Callable[[Engine, Size, Prompts], list[RequestOutput]]
    has_grammar: bool = False


WORKLOADS: Final = {
    "shared-prefix": Workload(
        "64 requests at once: 1,024 common prompt tokens, 64 different ones, 16 output tokens", _shared_prefix
    ),
    "multi-turn": Workload(
        "8 conversations of 4 turns: 128 new prompt tokens per turn after the history, 64 output tokens", _multi_turn
    ),
    "unshared": Workload("32 requests at once: 64 to 512 prompt tokens, 16 to 128 output tokens", _unshared),
    "single-stream": Workload("3 requests, one after the other: 512 prompt tokens, 128 output tokens", _single_stream),
    "structured": Workload(
        "16 requests at once: 256 prompt tokens; the output is a record that matches a regular expression",
        _structured,
        has_grammar=True,
    ),
}

#: The workloads that run by default, which every engine supports.
DEFAULT_WORKLOADS: Final = tuple(name for name, workload in WORKLOADS.items() if not workload.has_grammar)
