"""Reuse odds: the leaf whose odds of being found again have fallen the furthest goes first."""

from dataclasses import dataclass
from math import log
from typing import Final, TypeAlias

from pydantic import Field

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats, Options

__all__ = ["ReuseOdds", "ReuseOddsOptions"]

#: Nodes of a kind are counted together: octaves of 1 + hits, and pairs of octaves of tokens and of end / tokens.
_Kind: TypeAlias = tuple[int, int, int]

#: The prior of a kind speaks as loudly as so many stays.
_PRIOR_STAYS: Final = 20.0

#: When so many stays of a kind have ended one way, all its counts are halved: what is older fades.
_MANY_STAYS: Final = 500.0

#: The prior of the return time, in seconds, and the share of the capacity that speaks as loudly.
_PRIOR_RETURN_S: Final = 100.0
_PRIOR_SHARE: Final = 0.05

#: When returned tokens come to so many times the capacity, what is older fades.
_MEMORY_SHARE: Final = 2.0

#: The head start in units of the mean time of return. Returns that came too late were never seen, early ones are
#: overcounted, and kinds that return more also return sooner. Fitted on recorded and generated traces.
_HEAD_START: Final = 0.75


class ReuseOddsOptions(Options):
    """Options of `reuse_odds`."""

    return_time_s: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds without a hit after which the odds of one have fallen to 1/e. null learns it; 0 is lru.",
    )
    cost_weight: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Power of the prefill cost per token in the order. 0 finds most tokens; 1 keeps what stands deep "
        "in long contexts, which takes most work to compute again.",
    )


@dataclass(frozen=True, slots=True)
class _Stay:
    """A node since its last hit, or since it was inserted."""

    kind: _Kind
    head_start_s: float


class ReuseOdds(EvictionStrategy):
    """Orders leaves by their odds of reuse: learned for each kind of node, and falling while nobody comes.

    A conversation goes on after a while, or it is over, and each second of silence speaks for the latter. If it goes on
    after a time that is exponentially distributed with mean T, then by Bayes' rule its odds, t seconds after the last
    access, are

        odds(t) = odds(0) exp(-t / T)

    An evicted token costs those odds times its prefill cost c, so leaves go in the order of odds(t) c^w, w being
    `cost_weight`. The logarithm of that, times T, is, up to the time that is now, which all leaves share,

        priority = last_access + T (log odds(0) + w log c)

    It is LRU with a head start, in seconds, for what is likely to return. The head start is set at insert and hit, and
    holds until the next. Where memory turns over in seconds it decides; where memory turns over in hours, recency does.

    **odds(0)** is learned. A stay begins when a node is inserted or hit, and ends with its next hit or its eviction.
    Nodes of like hits, length and place are of one kind, and of each kind

        odds(0) = (returned + 20 prior) / (evicted + 20)
        prior   = 30 (1 + hits) (end / tokens)^(1/4) tokens^(-1/2)        end = depth + tokens

    The prior says: each hit is evidence for one more; a node much shorter than what stands before it is a turn of
    something that goes on; a long node that starts a prompt is a document that is asked once. Its powers were fitted on
    the first half of the Mooncake conversation trace; what a server then sees outweighs it. Returns after an eviction
    are not seen; that lowers the odds of all kinds about alike, and what all have alike moves no leaf past another.

    **T** is 3/4 of the mean time between a node's insert and first hit, weighed by tokens, so that the many hits of
    one system prompt do not set it. Old observations fade from both.

    Each hook costs O(1). Related: GreedyDual-Size-Frequency (Cherkasova, 1998) multiplies hits, cost and inverse size
    too, but ages by an inflation value that is added to the product. LHD (Beckmann et al., "LHD: Improving Cache Hit
    Rate by Maximizing Hit Density", NSDI 2018) learns the hits of classes too, by age, for which priorities must change
    as time goes by; here the exponential makes them constant.
    """

    def __init__(self, options: ReuseOddsOptions, context: EvictionContext) -> None:
        capacity_tokens = context.total_pages * context.page_size
        self._return_time = _ReturnTime(capacity_tokens)
        self._given_return_time_s = options.return_time_s
        self._cost_weight = options.cost_weight
        self._stays: dict[NodeStats, _Stay] = {}
        self._odds: dict[_Kind, _Odds] = {}

    @property
    def return_time_s(self) -> float:
        """The T of nodes that are inserted or hit now: seconds that a factor of e in the odds is worth."""
        if self._given_return_time_s is not None:
            return self._given_return_time_s
        return _HEAD_START * self._return_time.mean_s

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access with its head start, in seconds; last access)."""
        return (node.last_access + self._stays[node].head_start_s, node.last_access)

    def on_insert(self, node: NodeStats) -> None:
        """Give a new node the head start of its kind."""
        self._begin(node)

    def on_hit(self, node: NodeStats) -> None:
        """Learn that a node of its kind returned, and give it the head start of the kind it is now."""
        self._odds[self._stays[node].kind].count_return()
        if node.hits == 1:
            self._return_time.observe(node.last_access - node.created, node.tokens)
        self._begin(node)

    def on_evict(self, node: NodeStats) -> None:
        """Learn that a node of its kind did not return."""
        self._odds[self._stays.pop(node).kind].count_eviction()

    def _begin(self, node: NodeStats) -> None:
        """Begin a stay."""
        tokens = max(node.tokens, 1)
        end = node.depth + tokens
        kind = ((1 + node.hits).bit_length(), tokens.bit_length() // 2, (end // tokens).bit_length() // 2)
        odds = self._odds.setdefault(kind, _Odds())
        prior = 30.0 * (1 + node.hits) * (end / tokens) ** 0.25 * tokens**-0.5
        log_value = log(odds.estimate(prior)) + self._cost_weight * log(node.prefill_cost / tokens)
        self._stays[node] = _Stay(kind, self.return_time_s * log_value)


class _Odds:
    """How the stays of one kind of node ended."""

    __slots__ = ("_evicted", "_returned")

    def __init__(self) -> None:
        self._returned = 0.0
        self._evicted = 0.0

    def estimate(self, prior: float) -> float:
        """Return the odds of a return, given what they were thought to be before anything was seen."""
        return (self._returned + _PRIOR_STAYS * prior) / (self._evicted + _PRIOR_STAYS)

    def count_return(self) -> None:
        """Count a stay that ended with a hit."""
        self._returned += 1.0
        self._fade()

    def count_eviction(self) -> None:
        """Count a stay that ended with an eviction."""
        self._evicted += 1.0
        self._fade()

    def _fade(self) -> None:
        if max(self._returned, self._evicted) > _MANY_STAYS:
            self._returned /= 2
            self._evicted /= 2


class _ReturnTime:
    """The mean time until a node's first hit, weighed by tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self._tokens = max(1.0, _PRIOR_SHARE * capacity_tokens)
        self._token_seconds = _PRIOR_RETURN_S * self._tokens
        self._most_tokens = max(1.0, _MEMORY_SHARE * capacity_tokens)

    @property
    def mean_s(self) -> float:
        """The mean, in seconds."""
        return self._token_seconds / self._tokens

    def observe(self, seconds: float, tokens: int) -> None:
        """Count a first hit."""
        self._token_seconds += seconds * tokens
        self._tokens += tokens
        if self._tokens > self._most_tokens:
            self._token_seconds /= 2
            self._tokens /= 2
