"""The parameters of a pooling request, which returns one vector for its prompt and no tokens."""

from dataclasses import dataclass
from typing import Final

from graftlm.errors import RequestError

__all__ = ["LAST", "MEAN", "SCORES", "Pooling"]

_WAYS: Final = ("mean", "last", "scores", "labels")


@dataclass(frozen=True, slots=True)
class Pooling:
    """The computation of one vector from a prompt's final hidden states.

    Attributes:
        way: kind of the vector. "mean": mean of all tokens' hidden states. "last": hidden state of the last token.
            "scores": output of the model's score head at the last token. "labels": log-probabilities of labels as the
            next token.
        token_ids: the labels as token ids, in the vector's order; empty unless the way is "labels".

    Raises:
        RequestError: the way is unknown, the way "labels" has no labels, or another way has labels.
    """

    way: str
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.way not in _WAYS:
            raise RequestError(f"pooling must be one of {', '.join(_WAYS)}, got {self.way!r}")
        if (self.way == "labels") != bool(self.token_ids):
            raise RequestError(
                f"pooling {self.way!r} needs {'at least one label' if not self.token_ids else 'no labels'}"
            )

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all tokens are read; otherwise only that of the last token."""
        return self.way == "mean"


MEAN: Final = Pooling("mean")
LAST: Final = Pooling("last")
SCORES: Final = Pooling("scores")
