"""An index of the texts in one namespace of the prefix cache, which finds what followed a sequence of tokens.

The texts are stored in segments of at most 65,536 elements:

    node         system prompt        question 1                     answer 1
    segment | -  t0 t1 t2 t3 t4 t5 | -  t3 t4 t5  q0 q1 q2 | -  q0 q1 q2  a0 a1 a2 a3 | ...
                                        context                 context

Each text follows a separator and the last tokens before it, its context, so that matches may begin in another node. A
hash table of each segment has the places of all sequences of `num_hashed` tokens. The tokens at these places are
compared, so a wrong entry of the table costs a little time and never gives a wrong result.

With n cached tokens in m nodes, and c = `max_match` tokens of context and separator for each node:

- The arrays have at most max(512, 16 (n + c m)) elements of 14.25 bytes; usually 2 to 4 (n + c m) elements.
- Storing or removing tokens takes O(1) amortised time for each token, context and node. At most 16,384 elements are
  moved at once, in about 2 ms.
- A search looks into each segment once, and compares at most 16 places.
- Tokens that were removed are overwritten at once, so no search can find them.

If more than 8 sequences have the same place in a table, the table has the 8 that were stored last.
"""

from typing import Final

import numpy as np

from graftlm.types import TokenIds
from graftlm_speculation.text_segment import MAX_CAPACITY, MIN_CAPACITY, Piece, TextSegment, hashes_of

__all__ = ["TextIndex"]

_MAX_COMPARED: Final = 16
_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int32)
#: Minimum number of tokens of a piece, except the last piece of a node.
_MIN_PIECE: Final = 64


class TextIndex:
    """Finds sequences of tokens in the nodes of one namespace, and the tokens that follow them.

    Args:
        num_hashed: minimum number of tokens of a match, at least 1.
        max_match: maximum number of tokens that are compared, from `num_hashed` to 64.
    """

    def __init__(self, num_hashed: int, max_match: int) -> None:
        self._num_hashed = num_hashed
        self._max_match = max_match
        self._ends: dict[int, Piece] = {}  # id of a node -> its last piece
        self._segments: list[TextSegment] = []  # only the last one has room

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def num_elements(self) -> int:
        """Number of elements of the arrays."""
        return sum(segment.capacity for segment in self._segments)

    def store(self, node_id: int, parent_id: int | None, token_ids: TokenIds) -> None:
        """Add a node.

        Args:
            parent_id: id of a node of this index; None for a node at the start of a prompt.
            token_ids: int32 [n], the node's own tokens.

        Raises:
            KeyError: `parent_id` is unknown.
        """
        piece = None if parent_id is None else self._ends[parent_id]
        context = _NO_TOKENS if piece is None else self._before(piece, piece.end)
        begins_node = True
        while len(token_ids):
            segment = self._with_room(1 + len(context) + min(len(token_ids), _MIN_PIECE))
            num_tokens = min(len(token_ids), segment.room - 1 - len(context))
            parent, piece = piece, Piece(piece, segment, begins_node)
            segment.store(piece, context, token_ids[:num_tokens])
            if parent is not None:
                parent.children[piece] = None
            context, token_ids, begins_node = self._before(piece, piece.end), token_ids[num_tokens:], False
        assert piece is not None, "a node has tokens"
        self._ends[node_id] = piece
        self._tidy()

    def split(self, node_id: int, upper_id: int, num_tokens: int) -> None:
        """Move the first tokens of a node to a new node above it.

        Raises:
            KeyError: `node_id` is unknown.
        """
        pieces = self._pieces_of(node_id)
        for piece in pieces:
            if num_tokens <= len(piece.token_ids):
                break
            num_tokens -= len(piece.token_ids)
        if num_tokens == len(piece.token_ids):
            upper, (lower,) = piece, piece.children
        else:
            upper, lower = piece.segment.split(piece, piece.start + num_tokens), piece
            if upper.parent is not None:
                del upper.parent.children[lower]
                upper.parent.children[upper] = None
            upper.children[lower] = None
            lower.parent = upper
        lower.begins_node = True
        self._ends[upper_id] = upper

    def remove(self, node_id: int) -> None:
        """Remove a node without children.

        Raises:
            KeyError: `node_id` is unknown.
        """
        pieces = self._pieces_of(node_id)
        del self._ends[node_id]
        if (parent := pieces[0].parent) is not None:
            del parent.children[pieces[0]]
        for piece in pieces:
            piece.segment.remove(piece)
        self._tidy()

    def following(self, token_ids: TokenIds, limit: int) -> tuple[int, TokenIds]:
        """Return the length of the longest match of the last tokens, and the tokens that follow it.

        Matches without following tokens do not count. Of equally long matches, the one that was stored last counts. If
        a node has several children, the tokens of the child that was stored or split last follow.

        Args:
            token_ids: int32 [n].
            limit: maximum number of following tokens.

        Returns: number of matched tokens, at least `num_hashed`, and int32 [m] with 1 to `limit` tokens; (0, int32 [0])
            if there is no match.
        """
        best, found = 0, _NO_TOKENS
        latest = token_ids[-self._max_match :]
        for segment, index in self._places(token_ids):
            piece = segment.owner(index)
            if piece is None or best == len(latest):
                continue
            length = _num_equal(self._before(piece, index + 1), latest)
            if length > best and length >= self._num_hashed and len(after := _tokens_after(piece, index + 1, limit)):
                best, found = length, after
        return best, found

    def _places(self, token_ids: TokenIds) -> list[tuple[TextSegment, int]]:
        """Return places where the last tokens may be, the place that was stored last first, at most 16."""
        if len(token_ids) < self._num_hashed or not self._segments:
            return []
        hashed = int(hashes_of(token_ids[-self._num_hashed :], self._num_hashed)[0])
        entries = np.array([segment.entries(hashed) for segment in self._segments])
        rows, ways = ((entries ^ np.uint32(hashed & 0xFFFF_0000)) <= 0xFFFF).nonzero()
        places = (entries[rows, ways] & 0xFFFF).tolist()
        latest = sorted(zip(rows.tolist(), places, strict=True), reverse=True)[:_MAX_COMPARED]
        return [(self._segments[row], place) for row, place in latest]

    def _pieces_of(self, node_id: int) -> list[Piece]:
        """Return the pieces of a node in order."""
        pieces = [self._ends[node_id]]
        while not pieces[-1].begins_node:
            parent = pieces[-1].parent
            assert parent is not None, "the first piece of a prompt begins a node"
            pieces.append(parent)
        return pieces[::-1]

    def _before(self, piece: Piece, end: int) -> TokenIds:
        """Return the last tokens of a text before an index of the piece's segment, int32 [up to max_match]."""
        return piece.segment.before(end, self._max_match)

    def _with_room(self, size: int) -> TextSegment:
        """Return the last segment if it has room for `size` elements; else a new one."""
        if not self._segments or self._segments[-1].room < size:
            num_live = sum(segment.num_live for segment in self._segments)
            capacity = min(MAX_CAPACITY, max(MIN_CAPACITY, 1 << (num_live + size).bit_length()))
            self._segments.append(TextSegment(capacity, self._num_hashed))
        return self._segments[-1]

    def _tidy(self) -> None:
        """Move the pieces out of segments that are mostly unused."""
        self._segments = [segment for segment in self._segments if segment.num_live]
        while (sparse := next((s for s in self._segments[:-1] if 4 * s.num_live < s.capacity), None)) is not None:
            self._move_out([sparse])
        num_live = sum(segment.num_live for segment in self._segments)
        if self.num_elements > max(2 * MIN_CAPACITY, 16 * num_live):
            self._move_out(list(self._segments))

    def _move_out(self, segments: list[TextSegment]) -> None:
        """Move the pieces of some segments to the last segment, or to a new one."""
        pieces = [piece for segment in segments for piece in segment.pieces]
        self._segments = [segment for segment in self._segments if segment not in segments]
        for piece in pieces:
            context, token_ids = self._before(piece, piece.start), piece.token_ids
            self._with_room(1 + len(context) + len(token_ids)).store(piece, context, token_ids)


def _tokens_after(piece: Piece, start: int, limit: int) -> TokenIds:
    """Return up to `limit` tokens from an index of a piece on, int32 [m]; they end before the id of an image or audio.

    Such ids are negative.
    """
    parts, num_missing = [], limit
    while True:
        parts.append(piece.segment.elements[start : min(piece.end, start + num_missing)])
        num_missing -= len(parts[-1])
        if not num_missing or not piece.children:
            break
        piece = next(reversed(piece.children))
        start = piece.start
    token_ids = np.concatenate(parts)
    is_media = token_ids < 0
    return token_ids[: is_media.argmax()] if is_media.any() else token_ids


def _num_equal(text: TokenIds, latest: TokenIds) -> int:
    """Return the number of last tokens that are equal in two arrays."""
    num_compared = min(len(text), len(latest))
    differs = (text[-num_compared:] != latest[-num_compared:])[::-1]
    return int(differs.argmax()) if differs.any() else num_compared
