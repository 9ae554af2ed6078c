"""Reuse odds: the leaf with the lowest odds of being reused is evicted first."""

from dataclasses import dataclass
from math import log
from typing import Final, TypeAlias

from pydantic import Field

from graftlm.contracts import EvictionContext, EvictionStrategy, NodeStats, Options

__all__ = ["ReuseOdds", "ReuseOddsOptions"]

#: The kind of a node: the logarithms of 1 + hits (base 2), of tokens and of end / tokens (both base 4), as whole
#: numbers. Nodes of one kind are counted together.
_Kind: TypeAlias = tuple[int, int, int]

#: Weight of the prior of a kind, as a number of stays.
_PRIOR_STAYS: Final = 20.0

#: When this number of a kind's stays has ended with a hit, or with an eviction, the kind's counts are halved. So older
#: observations lose weight.
_MAX_STAYS: Final = 500.0

#: The prior of the return time, in seconds, and its weight, as a share of the capacity in tokens.
_PRIOR_RETURN_S: Final = 100.0
_PRIOR_SHARE: Final = 0.05

#: When the tokens of first hits exceed this multiple of the capacity, the sums of the mean return time are halved.
_MEMORY_SHARE: Final = 2.0

#: T in units of the mean observed return time. It is not 1 because returns after an eviction are not observed, early
#: returns are overcounted, and kinds that return more often also return sooner. Fitted on recorded and generated
#: traces.
_HEAD_START: Final = 0.75


class ReuseOddsOptions(Options):
    """Options of `reuse_odds`."""

    return_time_s: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds without a hit after which the odds of a hit have fallen to 1/e. Null: learned. 0: the "
        "same order as `lru`.",
    )
    cost_weight: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Exponent of the prefill cost per token in the order. 0 gives the highest hit rate. 1 keeps tokens "
        "that are deep in long contexts, whose prefill is the most expensive.",
    )


@dataclass(frozen=True, slots=True)
class _Stay:
    """The current stay of a node: the time since its last hit, or since its insert if it has had no hit."""

    kind: _Kind
    head_start_s: float


class ReuseOdds(EvictionStrategy):
    """Orders leaves by their odds of reuse, which are learned for each kind of node and decrease without hits.

    A conversation either continues after some time or has ended. The longer it has been idle, the more likely it has
    ended. Assume that the time until it continues is exponentially distributed with mean T. Then, by Bayes' rule, the
    odds that it continues, t seconds after the last access, are

        odds(t) = odds(0) exp(-t / T)

    The expected cost of evicting a token is these odds times its prefill cost c. Leaves are evicted in the order of
    odds(t) c^w, where w is `cost_weight`. The logarithm of this product, times T, plus the current time (which is the
    same for all leaves), is

        priority = last_access + T (log odds(0) + w log c)

    This is LRU with a head start, in seconds, for leaves that are likely to be reused. The head start is computed at
    insert and at each hit, and is constant between them. If leaves are evicted after seconds, the head start decides
    the order; if they are evicted after hours, recency decides it.

    **odds(0)** is learned. A stay starts when a node is inserted or hit, and ends with its next hit or its eviction.
    Nodes with similar hits, length and depth are of one kind. For each kind,

        odds(0) = (returned + 20 prior) / (evicted + 20)
        prior   = 30 (1 + hits) (end / tokens)^(1/4) tokens^(-1/2)        end = depth + tokens

    The prior expresses three facts. Each hit is evidence for another hit. A node that is much shorter than the tokens
    before it is a turn of a conversation, which probably continues. A long node at the start of a prompt is a document,
    which is probably used once. The exponents were fitted on the first half of the Mooncake conversation trace; the
    observations of a server soon outweigh the prior. Returns after an eviction are not observed. This lowers the odds
    of all kinds by about the same factor, so it does not change the order.

    **T** is 3/4 of the mean time between a node's insert and its first hit, weighted by tokens. Only first hits count,
    so that the many hits of one system prompt do not dominate it. In both estimates, old observations lose weight.

    Each hook costs O(1). Related work: GreedyDual-Size-Frequency (Cherkasova, 1998) also multiplies hits, cost and
    inverse size, but ages by an inflation value that is added to the product. LHD (Beckmann et al., "LHD: Improving
    Cache Hit Rate by Maximizing Hit Density", NSDI 2018) also learns the hits of classes, by age; its priorities change
    with time, whereas the exponential distribution makes them constant here.

    Args:
        options: see `ReuseOddsOptions`.
        context: the cache's capacity.
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
        """T, in seconds, for nodes that are inserted or hit now: a factor of e in the odds is worth T seconds."""
        if self._given_return_time_s is not None:
            return self._given_return_time_s
        return _HEAD_START * self._return_time.mean_s

    def priority(self, node: NodeStats) -> tuple[float, ...]:
        """Return (last access plus head start, last access), in seconds."""
        return (node.last_access + self._stays[node].head_start_s, node.last_access)

    def on_insert(self, node: NodeStats) -> None:
        """Set the head start of a new node."""
        self._begin(node)

    def on_hit(self, node: NodeStats) -> None:
        """Count a return for the node's kind, and set the head start of its new kind."""
        self._odds[self._stays[node].kind].count_return()
        if node.hits == 1:
            self._return_time.observe(node.last_access - node.created, node.tokens)
        self._begin(node)

    def on_evict(self, node: NodeStats) -> None:
        """Count an eviction for the node's kind."""
        self._odds[self._stays.pop(node).kind].count_eviction()

    def _begin(self, node: NodeStats) -> None:
        """Start a stay."""
        tokens = max(node.tokens, 1)
        end = node.depth + tokens
        kind = ((1 + node.hits).bit_length(), tokens.bit_length() // 2, (end // tokens).bit_length() // 2)
        odds = self._odds.setdefault(kind, _Odds())
        prior = 30.0 * (1 + node.hits) * (end / tokens) ** 0.25 * tokens**-0.5
        log_value = log(odds.estimate(prior)) + self._cost_weight * log(node.prefill_cost / tokens)
        self._stays[node] = _Stay(kind, self.return_time_s * log_value)


class _Odds:
    """Counts of the stays of one kind of node, by how they ended."""

    __slots__ = ("_evicted", "_returned")

    def __init__(self) -> None:
        self._returned = 0.0
        self._evicted = 0.0

    def estimate(self, prior: float) -> float:
        """Return the estimated odds of a return.

        Args:
            prior: the odds assumed without observations.
        """
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
        if max(self._returned, self._evicted) > _MAX_STAYS:
            self._returned /= 2
            self._evicted /= 2


class _ReturnTime:
    """The mean time from a node's insert to its first hit, weighted by tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self._tokens = max(1.0, _PRIOR_SHARE * capacity_tokens)
        self._token_seconds = _PRIOR_RETURN_S * self._tokens
        self._most_tokens = max(1.0, _MEMORY_SHARE * capacity_tokens)

    @property
    def mean_s(self) -> float:
        """The mean, in seconds."""
        return self._token_seconds / self._tokens

    def observe(self, seconds: float, tokens: int) -> None:
        """Record a first hit.

        Args:
            seconds: time from insert to hit.
            tokens: number of tokens in the node.
        """
        self._token_seconds += seconds * tokens
        self._tokens += tokens
        if self._tokens > self._most_tokens:
            self._token_seconds /= 2
            self._tokens /= 2
