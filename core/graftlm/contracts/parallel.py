"""The contract of a communicator, and the part of a model that one rank holds.

A replica may run on several ranks, which compute the same steps, each with a part of every layer. A `Shard` is the part
of one dimension that a rank holds. Layers get shards in place of sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from graftlm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ONE_RANK", "Communicator", "ParallelContext", "Piece", "Shard"]


class Communicator(ABC):
    """Exchanges tensors between the ranks of a group. On every rank, the same calls are made in the same order.

    Invariants, each checked by `graftlm.testing.CommunicatorConformance`:
        - Every method returns the values of its description, for contiguous tensors on the communicator's device.
        - `all_reduce` returns equal bits on all ranks and in all runs.
        - If a rank ends, or makes no matching call in time, the calls of all other ranks raise before the deadline.
        - After an error, every later call raises.

    Attributes:
        rank: index of this rank in the group, from 0.
        size: number of ranks.
        timeout_s: deadline of every call, in seconds from its start.
    """

    rank: int
    size: int
    timeout_s: float

    @property
    def repeats_calls(self) -> bool:
        """Whether `all_reduce` is a call of a kernel through `graftlm.layers.call_native` that may be repeated."""
        return False

    @abstractmethod
    def all_reduce(self, tensor: Tensor, operation: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Replace a tensor by the sum, minimum or maximum over all ranks, in place, and return it.

        Raises:
            RankFailedError: another rank ended or made no matching call in time. All methods raise this error.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks in the order of the ranks, [size, *shape]. Their shapes must be equal."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks of their `tensor[rank]`, for a tensor of shape [size, *shape]."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank, and return the received rows in the order of the ranks.

        Args:
            tensor: [sum of num_sent, ...].
            num_sent: number of rows for each rank.
            num_received: number of rows from each rank, which must equal what that rank sends.
        """

    @abstractmethod
    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to another rank, which calls `receive`."""

    @abstractmethod
    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Replace a tensor by the tensor that another rank sends, and return it."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Replace a tensor by that of a rank, on all other ranks, and return it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Calls of other ranks may raise afterwards."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The place of a rank among the ranks that split every layer.

    Attributes:
        rank: index of the rank, from 0.
        size: number of ranks.
        communicator: connects the ranks; None if there is one rank, or if the model does not run.
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None

    @property
    def repeats_calls(self) -> bool:
        """Whether the exchange between ranks can be repeated without Python code; see `Model.repeats_calls`."""
        return self.size == 1 or (self.communicator is not None and self.communicator.repeats_calls)

    def shard(self, size: int, name: str) -> Shard:
        """Return this rank's part of a dimension.

        Args:
            size: length of the dimension.
            name: name of the length in config.json.

        Raises:
            ConfigError: the ranks cannot share the dimension equally.
        """
        self.check({name: size})
        return self.heads(size, 1)

    def heads(self, num_heads: int, head_dim: int) -> Shard:
        """Return this rank's part of the features of heads. If there are fewer heads than ranks, heads are repeated.

        Args:
            num_heads: number of heads, a multiple or a divisor of the number of ranks.
            head_dim: number of features of a head.
        """
        num_parts = min(num_heads, self.size)
        length, num_copies = num_heads * head_dim // num_parts, self.size // num_parts
        start = self.rank // num_copies * length
        return Shard(num_heads * head_dim, (Piece(start, start + length, num_copies),), self)

    def padded(self, size: int) -> Shard:
        """Return this rank's part of a dimension of any size. The last parts are padded to the length of the first."""
        length = -(-size // self.size)
        start, stop = (min(size, rank * length) for rank in (self.rank, self.rank + 1))
        return Shard(size, (Piece(start, stop),), self, length - (stop - start))

    def check(self, counts: Mapping[str, int], repeated: Mapping[str, int] | None = None) -> None:
        """Check that the ranks can share a model's parts equally.

        Args:
            counts: name in config.json -> number, which must be a multiple of the number of ranks.
            repeated: as `counts`, for parts that may be repeated: multiples or divisors of the number of ranks.

        Raises:
            ConfigError: the ranks cannot share a part. The message has the nearest numbers of ranks that could.
        """

        def misfits(size: int) -> list[str]:
            wrong = [f"{name} {count}" for name, count in counts.items() if count % size]
            return wrong + [f"{name} {n}" for name, n in (repeated or {}).items() if n % size and size % n]

        wrong = misfits(self.size)
        if not wrong:
            return
        fitting = [size for size in range(1, max(counts.values(), default=1) + 1) if not misfits(size)]
        nearest = [str(size) for size in _nearest(fitting, self.size)]
        raise ConfigError(
            f"parallel.tensor is {self.size}, but this number of ranks cannot share {' and '.join(wrong)} equally. The "
            f"nearest {'numbers' if len(nearest) > 1 else 'number'} of ranks for this model: {' and '.join(nearest)}"
        )


def _nearest(fitting: Sequence[int], size: int) -> list[int]:
    """Return the largest number below `size` and the smallest above it, of ascending numbers that begin with 1."""
    for below, above in pairwise(fitting):
        if below < size < above:
            return [below, above]
    return [fitting[-1]]


#: The context of a model that is not split.
ONE_RANK: Final = ParallelContext()


class Piece(NamedTuple):
    """The interval start : stop of a dimension, which `num_copies` consecutive ranks hold."""

    start: int
    stop: int
    num_copies: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a dimension that one rank holds.

    Attributes:
        size: length of the whole dimension.
        pieces: the intervals of the dimension that the rank holds, in the order of its memory.
        parallel: the ranks that share the dimension.
        padding: number of unused elements after the pieces.
    """

    size: int
    pieces: tuple[Piece, ...]
    parallel: ParallelContext
    padding: int = 0

    @property
    def length(self) -> int:
        """Number of elements that the rank stores, with padding."""
        return self.num_used + self.padding

    @property
    def num_used(self) -> int:
        """Number of elements that the rank stores, without padding."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def start(self) -> int:
        """Index of the first element."""
        return self.pieces[0].start

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole dimension."""
        return self.parallel.size == 1

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of the ranks; None if the rank holds the whole dimension, or if the model does not run."""
        return None if self.is_whole else self.parallel.communicator

    @classmethod
    def whole(cls, size: int) -> Shard:
        """Return a whole dimension."""
        return cls(size, (Piece(0, size),), ONE_RANK)

    def then(self, other: Shard) -> Shard:
        """Return the part of a longer dimension: this dimension, followed by another one. Neither has padding."""
        moved = tuple(Piece(self.size + start, self.size + stop, n) for start, stop, n in other.pieces)
        return Shard(self.size + other.size, self.pieces + moved, self.parallel)

    def times(self, factor: int) -> Shard:
        """Return the part of a dimension with `factor` consecutive elements for each element. There is no padding."""
        pieces = tuple(Piece(factor * start, factor * stop, n) for start, stop, n in self.pieces)
        return Shard(factor * self.size, pieces, self.parallel)
