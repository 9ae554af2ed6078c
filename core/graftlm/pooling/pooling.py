"""What a request asks for that wants one vector of its prompt, and no tokens."""

from dataclasses import dataclass
from typing import Final

from graftlm.errors import RequestError

__all__ = ["LAST", "MEAN", "SCORES", "Pooling"]

_WAYS: Final = ("mean", "last", "scores", "labels")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt's final hidden states become one vector.

    Attributes:
        way: "mean" of all tokens' states, or of the "last" token the states themselves, the "scores" of the model's
            head, or the log-probabilities of "labels" as the next token.
        token_ids: the labels, in the vector's order.

    Raises:
        RequestError: there is no such way, or labels are missing or surplus.
    """

    way: str
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.way not in _WAYS:
            raise RequestError(f"pooling must be one of {', '.join(_WAYS)}, got {self.way!r}")
        if (self.way == "labels") != bool(self.token_ids):
            raise RequestError(f"pooling {self.way!r} takes {'at least one label' if not self.token_ids else 'none'}")

    @property
    def reads_all(self) -> bool:
        """Whether the states of every token are read; else those of the last one."""
        return self.way == "mean"


MEAN: Final = Pooling("mean")
LAST: Final = Pooling("last")
SCORES: Final = Pooling("scores")
