"""A block of fixed size that stores pieces of text and finds sequences of tokens in them."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.types import TokenIds

__all__ = ["MAX_CAPACITY", "MIN_CAPACITY", "Piece", "TextSegment", "hashes_of"]

MIN_CAPACITY: Final = 256
#: Maximum number of elements of a segment; indices are uint16.
MAX_CAPACITY: Final = 1 << 16

#: Number of indices in the table with the same hash.
_WAYS: Final = 8
#: An element that is no token: a separator, or a removed token.
_NO_TOKEN: Final = -1
#: Bits of an entry that are bits of the hash; the other bits are an index.
_TAG_BITS: Final = np.uint32(0xFFFF_0000)
#: An odd number from the golden ratio, for multiplicative hashing (Knuth, The Art of Computer Programming, 6.4).
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, eq=False)
class Piece:
    """A part of a node of the cache, in one segment.

        first                start                 end
          | separator | context | own tokens        |

    Attributes:
        parent: the piece before it; None for a piece at the start of a prompt.
        segment: the segment with the piece's tokens.
        begins_node: whether the piece is the first one of its node.
        children: the pieces after it, as keys; the piece that was stored or split last is the last one.
        first: index of the separator. A piece that was split off from the end of another one has neither separator nor
            context of its own, because the other piece precedes it in the segment; then it equals `start`.
        start, end: indices of the own tokens.
    """

    parent: "Piece | None"
    segment: "TextSegment"
    begins_node: bool
    first: int = 0
    start: int = 0
    end: int = 0
    children: "dict[Piece, None]" = field(default_factory=dict)

    @property
    def token_ids(self) -> TokenIds:
        """The own tokens, int32 [n]; a view."""
        return self.segment.elements[self.start : self.end]


class TextSegment:
    """Stores pieces of text until it is full, and finds the places where a hash of tokens was seen.

    The table has 8 entries for each value of the high bits of a hash. An entry consists of 16 further bits of the hash
    and of the index of the last hashed token. A new entry replaces the oldest entry.

    Args:
        capacity: maximum number of elements, a power of two from `MIN_CAPACITY` to `MAX_CAPACITY`.
        num_hashed: number of tokens in a hash.

    Attributes:
        elements: int32 [capacity], tokens and separators. Removed tokens are overwritten.
        num_used: number of elements in use, including those of removed pieces.
        num_live: number of elements of pieces that were not removed.
    """

    def __init__(self, capacity: int, num_hashed: int) -> None:
        num_buckets = 2 * capacity // _WAYS
        self.elements: NDArray[np.int32] = np.full(capacity, _NO_TOKEN, dtype=np.int32)
        self.num_used = 1  # a separator at index 0, to which empty entries of the table refer
        self.num_live = 0
        self._num_hashed = num_hashed
        self._owners: NDArray[np.uint16] = np.zeros(capacity, dtype=np.uint16)  # indices into `_pieces`
        self._pieces: list[Piece | None] = [None]
        self._table: NDArray[np.uint32] = np.zeros((num_buckets, _WAYS), dtype=np.uint32)
        self._next_ways: NDArray[np.uint8] = np.zeros(num_buckets, dtype=np.uint8)
        self._shift = 64 - (num_buckets - 1).bit_length()

    @property
    def capacity(self) -> int:
        """Number of elements."""
        return len(self.elements)

    @property
    def room(self) -> int:
        """Number of elements that can still be stored."""
        return len(self.elements) - self.num_used

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.elements.nbytes + self._owners.nbytes + self._table.nbytes + self._next_ways.nbytes

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in this segment."""
        return [piece for piece in self._pieces if piece is not None]

    def store(self, piece: Piece, context: TokenIds, token_ids: TokenIds) -> None:
        """Store a piece, and set its segment and indices. There must be room for a separator and both arrays."""
        first = self.num_used
        start = first + 1 + len(context)
        end = start + len(token_ids)
        self.elements[first + 1 : start] = context
        self.elements[start:end] = token_ids
        self.num_used = end
        self.num_live += end - first
        piece.segment, piece.first, piece.start, piece.end = self, first, start, end
        self._own(piece)
        self._hash(max(start, first + self._num_hashed), end)

    def split(self, lower: Piece, cut: int) -> Piece:
        """Move the elements of a piece before index `cut` to a new piece, which is returned; it has no children."""
        upper = Piece(lower.parent, self, lower.begins_node, lower.first, lower.start, cut)
        lower.first = lower.start = cut
        self._own(upper)
        return upper

    def remove(self, piece: Piece) -> None:
        """Overwrite the tokens of a piece."""
        self._pieces[self._owners[piece.first]] = None
        self.elements[piece.first : piece.end] = _NO_TOKEN
        self._owners[piece.first : piece.end] = 0
        self.num_live -= piece.end - piece.first

    def entries(self, hashed: int) -> NDArray[np.uint32]:
        """Return the entries of the table in which a hash may be, uint32 [8]. Their high 16 bits are bits of hashes."""
        entries: NDArray[np.uint32] = self._table[hashed >> self._shift]
        return entries

    def owner(self, index: int) -> Piece | None:
        """Return the piece to which an element belongs; None for a removed element and for index 0."""
        return self._pieces[int(self._owners[index])]

    def before(self, end: int, num_tokens: int) -> TokenIds:
        """Return up to `num_tokens` tokens of one text before an index, int32; a view."""
        tail = self.elements[max(0, end - num_tokens) : end]
        separators = (tail == _NO_TOKEN).nonzero()[0]
        return tail[separators[-1] + 1 :] if len(separators) else tail

    def _own(self, piece: Piece) -> None:
        self._owners[piece.first : piece.end] = len(self._pieces)
        self._pieces.append(piece)

    def _hash(self, start: int, end: int) -> None:
        """Add the indices from `start` to `end` to the table. `num_hashed` tokens of one text end at each of them."""
        if start >= end:
            return
        hashes = hashes_of(self.elements[start - self._num_hashed + 1 : end], self._num_hashed)
        buckets = (hashes >> np.uint64(self._shift)).astype(np.uint16)
        entries = (hashes.astype(np.uint32) & _TAG_BITS) | np.arange(start, end, dtype=np.uint32)
        order = buckets.argsort(kind="stable")
        buckets, entries = buckets[order], entries[order]
        # Entries of one bucket are consecutive now, the oldest first. At most 8 of them are stored.
        firsts = np.flatnonzero(np.diff(buckets, prepend=-1))
        sizes = np.diff(firsts, append=len(buckets))
        ranks = np.arange(len(buckets)) - np.repeat(firsts, sizes)
        is_stored = ranks >= np.repeat(sizes, sizes) - _WAYS
        ways = (self._next_ways[buckets] + ranks) % _WAYS
        self._table[buckets[is_stored], ways[is_stored]] = entries[is_stored]
        self._next_ways[buckets[firsts]] = (self._next_ways[buckets[firsts]] + sizes) % _WAYS


def hashes_of(token_ids: TokenIds, num_hashed: int) -> NDArray[np.uint64]:
    """Return the hash of each `num_hashed` consecutive tokens, uint64 [n - num_hashed + 1]."""
    tokens = token_ids.astype(np.uint64)
    hashes = np.zeros(len(tokens) - num_hashed + 1, dtype=np.uint64)
    for i in range(num_hashed):
        hashes += tokens[i : i + len(hashes)]
        hashes *= _MULTIPLIER
    # The low bits of a product depend on few bits of the factors.
    hashes ^= hashes >> np.uint64(32)
    return hashes
