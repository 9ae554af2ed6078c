"""How often drafted tokens were accepted, by drafter, confidence and request."""

from dataclasses import dataclass, field
from typing import Final

__all__ = ["Acceptance"]

_NUM_LEVELS: Final = 8
#: Weight of what was seen before, for each further draft.
_DECAY: Final = 0.98
_ROW_DECAY: Final = 0.85
#: Trials as which the drafter's own confidence counts, and those as which all requests' acceptance counts for one.
_PRIOR_TRIALS: Final = 4.0
_SHARED_TRIALS: Final = 2.0


@dataclass(slots=True)
class _Trials:
    """Decayed numbers of drafted tokens that followed accepted ones, and of accepted ones among them."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, tried: int, accepted: int, decay: float) -> None:
        self.tried = self.tried * decay + tried
        self.accepted = self.accepted * decay + accepted


@dataclass(slots=True)
class Acceptance:
    """Estimates the probability that a drafted token is accepted if those before it were.

    The estimate starts at the drafter's confidence, moves to what all requests saw at that confidence, and from there
    to what the request itself saw lately.
    """

    _shared: dict[tuple[str, int], _Trials] = field(default_factory=dict)
    _rows: dict[int, _Trials] = field(default_factory=dict)

    def probability(self, row: int, drafter: str, confidence: float) -> float:
        """Return the estimate for a draft of a row, from 0 to 1."""
        shared = self._shared.get((drafter, _level(confidence)))
        rate = confidence
        if shared is not None:
            rate = (shared.accepted + _PRIOR_TRIALS * confidence) / (shared.tried + _PRIOR_TRIALS)
        own = self._rows.get(row)
        if own is None:
            return rate
        return (own.accepted + _SHARED_TRIALS * rate) / (own.tried + _SHARED_TRIALS)

    def observe(self, row: int, drafter: str, confidence: float, num_drafted: int, num_accepted: int) -> None:
        """Add a verified draft. Tokens after the first rejected one were not tried."""
        tried = min(num_accepted + 1, num_drafted)
        key = drafter, _level(confidence)
        self._shared.setdefault(key, _Trials()).add(tried, num_accepted, _DECAY)
        self._rows.setdefault(row, _Trials()).add(tried, num_accepted, _ROW_DECAY)

    def close(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)


def _level(confidence: float) -> int:
    return min(int(confidence * _NUM_LEVELS), _NUM_LEVELS - 1)
