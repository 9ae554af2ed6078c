"""The workloads that an engine is measured by, in its own process."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from graftlm.engine.engine import Engine
from graftlm.types import RequestOutput, SamplingParams

__all__ = ["DEFAULT_WORKLOADS", "WORKLOADS", "Prompts", "Size", "Workload"]

#: Token ids below this are not drawn: many tokenizers keep their special tokens there.
_FIRST_TOKEN_ID: Final = 300
_FULL_CONTEXT: Final = 1104

#: Most of what it allows has no alternative, as in the JSON that programs ask for.
_RECORD: Final = (
    r'\{"registration_number": [0-9]{6}, "is_active_member": (true|false), "preferred_language": "(en|de|fr)"\}'
)
#: Tokens that a record may take, if each is a byte.
_RECORD_TOKENS: Final = 100


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a workload to run.

    Attributes:
        requests: factor on the number of requests.
        lengths: factor on their lengths, at most 1.
    """

    requests: float
    lengths: float

    @classmethod
    def of(cls, scale: float, context_len: int) -> "Size":
        """Scale the number of requests, and fit their lengths into the model's context."""
        return cls(scale, min(1.0, context_len / _FULL_CONTEXT))

    def count(self, full: int) -> int:
        """Return how many requests stand for `full`."""
        return max(1, round(full * self.requests))

    def tokens(self, full: int) -> int:
        """Return how many tokens stand for `full`."""
        return max(2, int(full * self.lengths))


class Prompts:
    """Draws prompts; the same seed draws the same ones."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._token_ids = range(min(_FIRST_TOKEN_ID, vocab_size // 2), vocab_size)

    def draw(self, num_tokens: int) -> list[int]:
        """Return random token ids."""
        return self._random.choices(self._token_ids, k=num_tokens)

    def between(self, low: int, high: int) -> int:
        """Return a number from low to high."""
        return self._random.randint(low, high)


def _fixed(num_tokens: int) -> SamplingParams:
    """Return greedy sampling of that many tokens."""
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
    """Requests to an engine.

    Attributes:
        summary: for a user.
        run: sends them and returns their outputs.
        has_grammar: they are constrained, and need a grammar backend.
    """

    summary: str
    run: Callable[[Engine, Size, Prompts], list[RequestOutput]]
    has_grammar: bool = False


WORKLOADS: Final = {
    "shared-prefix": Workload(
        "64 requests at once: a common prompt of 1,024 tokens, 64 of their own, 16 to generate", _shared_prefix
    ),
    "multi-turn": Workload(
        "8 conversations of 4 turns: 128 tokens more each turn, 64 to generate, the history sent again", _multi_turn
    ),
    "unshared": Workload("32 requests at once: 64 to 512 tokens of their own, 16 to 128 to generate", _unshared),
    "single-stream": Workload("1 request at a time, 3 in all: 512 tokens, 128 to generate", _single_stream),
    "structured": Workload(
        "16 requests at once: 256 tokens, a record of fixed keys to generate under a regular expression",
        _structured,
        has_grammar=True,
    ),
}

#: What runs when none is named: what every engine can run.
DEFAULT_WORKLOADS: Final = tuple(name for name, workload in WORKLOADS.items() if not workload.has_grammar)
