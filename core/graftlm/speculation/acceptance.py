"""Estimates acceptance rates of drafted tokens by drafter, confidence and request."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Acceptance"]

_NUM_LEVELS: Final = 8
#: Factor by which the weight of earlier trials falls with each trial: of all requests, and of one request.
_DECAY: Final = 0.995
_ROW_DECAY: Final = 0.96
#: Factor by which the weight of earlier trials falls with each step that leaves a draft out.
_FADING: Final = 0.998
#: Weights of the drafter's confidence and of the acceptance over all requests, as numbers of trials.
_PRIOR_TRIALS: Final = 2.0
_SHARED_TRIALS: Final = 1.0


@dataclass(slots=True)
class _Trials:
    """Decaying counts of tried and accepted tokens. A token counts as tried if all tokens before it were accepted."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, tried: int, accepted: int, decay: float) -> None:
        """Add trials, and reduce the weight of the earlier ones."""
        self.tried = self.tried * decay + tried
        self.accepted = self.accepted * decay + accepted


@dataclass(slots=True)
class Acceptance:
    """Estimates the probability that a drafted token is accepted if all tokens before it were accepted.

    The first estimate is the drafter's confidence. With more trials, it approaches the acceptance rate of all requests
    at this confidence, and then the request's own recent acceptance rate for this drafter.
    """

    _shared: dict[tuple[str, int], _Trials] = field(default_factory=dict)
    _rows: dict[int, dict[str, _Trials]] = field(default_factory=dict)

    def probability(self, row: int, drafter: str, confidence: float) -> float:
        """Return the estimate for a draft of a row, from 0 to 1."""
        shared = self._shared.get((drafter, _level(confidence)))
        rate = confidence
        if shared is not None:
            rate = (shared.accepted + _PRIOR_TRIALS * confidence) / (shared.tried + _PRIOR_TRIALS)
        own = self._rows.get(row, {}).get(drafter)
        if own is None:
            return rate
        return (own.accepted + _SHARED_TRIALS * rate) / (own.tried + _SHARED_TRIALS)

    def observe(self, row: int, drafter: str, confidence: float, num_drafted: int, num_accepted: int) -> None:
        """Add a verified draft. Tokens after the first rejected one do not count as tried."""
        tried = min(num_accepted + 1, num_drafted)
        key = drafter, _level(confidence)
        self._shared.setdefault(key, _Trials()).add(tried, num_accepted, _DECAY**tried)
        self._rows.setdefault(row, {}).setdefault(drafter, _Trials()).add(tried, num_accepted, _ROW_DECAY**tried)

    def fade(self, drafts: Iterable[tuple[int, str, float]]) -> None:
        """Reduce the weight of earlier trials for drafts that a step leaves out.

        Without this, a drafter whose drafts were once rejected would never be tried again.

        Args:
            drafts: row, drafter and confidence of each draft.
        """
        keys = set()
        for row, drafter, confidence in drafts:
            keys.add((drafter, _level(confidence)))
            if (own := self._rows.get(row, {}).get(drafter)) is not None:
                own.add(0, 0, _FADING)
        for key in keys & self._shared.keys():
            self._shared[key].add(0, 0, _FADING)

    def close(self, row: int) -> None:
        """Remove the trials of a row."""
        self._rows.pop(row, None)


def _level(confidence: float) -> int:
    return min(int(confidence * _NUM_LEVELS), _NUM_LEVELS - 1)
