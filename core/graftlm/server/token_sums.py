"""The replicas' token counters, added up over all replicas and restarts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graftlm.processes.messages import Load
from graftlm.processes.replicas import Replica

__all__ = ["TokenCounters", "TokenSums"]


class TokenSums(NamedTuple):
    """Sums of the token counters of all replicas, including those that have died.

    Attributes:
        time_s: reading of the clock, in seconds.
        prefill_tokens: number of prompt tokens that steps computed, including tokens that were computed again.
        jump_forward_tokens, accepted_tokens: numbers of `generated_tokens` that a grammar forced, and of those that
            were drafted.
        drafted_tokens: number of drafted tokens that a step verified.
    """

    time_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    jump_forward_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def since(self, earlier: "TokenSums") -> "TokenSums":
        """Return the growth of each number since `earlier`; `time_s` becomes the seconds between the two."""
        seconds, *counts = (now - before for now, before in zip(self, earlier, strict=True))
        return TokenSums(seconds, *map(int, counts))

    @property
    def sampled_tokens(self) -> int:
        """Number of generated tokens that a step sampled, which is the number of decode steps of all requests."""
        return self.generated_tokens - self.jump_forward_tokens - self.accepted_tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were cached, from 0 to 1; None without prompt tokens."""
        # A prompt's tokens are counted when it is queued, but its cached tokens only when it is admitted. Therefore
        # the quotient can exceed 1.
        return min(1.0, self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else None

    @property
    def accept_len(self) -> float | None:
        """Mean number of tokens per decode step of a request, without jump-forward; None if nothing was drafted."""
        if not self.drafted_tokens or self.sampled_tokens <= 0:
            return None
        return 1 + self.accepted_tokens / self.sampled_tokens

    @property
    def accept_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted, from 0 to 1; None if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


class TokenCounters:
    """Adds up the replicas' counters. A restarted replica counts from 0, which lowers no sum.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._counted: dict[str, Load] = {}
        self._sums = TokenSums(clock())

    def read(self) -> TokenSums:
        """Return the sums up to the replicas' latest reports."""
        sums = list(self._sums[1:])
        for replica in self._replicas:
            if replica.load is None:
                self._counted.pop(replica.name, None)
                continue
            load, before = replica.load, self._counted.get(replica.name)
            if before is not None and load.stats.steps < before.stats.steps:
                before = None
            earlier = (0,) * len(sums) if before is None else _counts(before)
            sums = [total + now - old for total, now, old in zip(sums, _counts(load), earlier, strict=True)]
            self._counted[replica.name] = load
        self._sums = TokenSums(self._clock(), *sums)
        return self._sums


def _counts(load: Load) -> tuple[int, ...]:
    """Return the counters in the order of `TokenSums`."""
    stats = load.stats
    return (
        stats.prompt_tokens,
        stats.cached_tokens,
        load.prefill_tokens,
        stats.generated_tokens,
        stats.jump_forward_tokens,
        sum(drafted for drafted, _ in stats.drafts.values()),
        sum(accepted for _, accepted in stats.drafts.values()),
    )
