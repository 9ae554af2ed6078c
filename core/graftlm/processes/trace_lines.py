"""The lines of a trace of requests. They show which blocks of tokens requests share, but contain no tokens.

    {"timestamp": 1767225600123, "input_length": 40, "output_length": 12, "hash_ids": [h0, h1, h2],
     "output_hash_ids": [o2, o3], "block_tokens": 16, "namespace": "", "priority": 0}

    tokens            |<-  block 0  ->|<-  block 1  ->|<- rest of the input ->|<-- output without last token ->|
    hash_ids          |       h0      |       h1      |          h2           |
    output_hash_ids                                   |       o2       |       o3       |  ...                  |

An id is a keyed hash of all tokens up to the end of its block, so equal ids mean equal prefixes. The last output token
is left out, since the model does not compute its keys and values and no cache contains it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from graftlm.types import TokenIds

__all__ = ["FinishedRequest", "TraceLines", "trace_block_tokens"]

#: Minimum number of tokens in a block. The length of a shared prefix is recorded only as a number of whole blocks.
_MIN_BLOCK_TOKENS: Final = 16
#: Number of bits in an id. Ids fit into the mantissa of a float64, so that every JSON reader preserves all bits.
_ID_BITS: Final = 53
_DIGEST_BYTES: Final = 8


def trace_block_tokens(page_size: int) -> int:
    """Return the number of tokens in a block of a server's trace: the page size, but at least 16."""
    return max(page_size, _MIN_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The data of a request that its trace lines contain.

    Attributes:
        prompt: token ids, int32 [n], C-contiguous.
        outputs: token ids of each completion.
        arrived_s: time of arrival, in seconds of the recorder's clock.
        namespace: namespace of the request's cached prefixes.
        priority: priority of the request.
    """

    prompt: TokenIds
    outputs: Sequence[Sequence[int]]
    arrived_s: float
    namespace: str = ""
    priority: int = 0


class TraceLines:
    """Converts requests into trace lines, whose ids are hashes with a secret key.

    Args:
        key: key of the hashes, at most 64 bytes. It must not be stored, because a reader who has the key can test
            whether the trace contains a given text.
        block_tokens: number of tokens in a block.
    """

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * np.dtype(np.int32).itemsize

    def of(self, request: FinishedRequest, timestamp_ms: int) -> Iterator[bytes]:
        """Yield one line for each completion.

        Args:
            timestamp_ms: time of the request's arrival, Unix time in milliseconds.
        """
        namespace = request.namespace.encode("utf-8", "surrogatepass")
        hasher = hashlib.blake2b(
            len(namespace).to_bytes(8, "big") + namespace, digest_size=_DIGEST_BYTES, key=self._key
        )
        namespace_id = hasher.hexdigest() if namespace else ""
        prompt = request.prompt.tobytes()
        num_whole_bytes = len(prompt) - len(prompt) % self._block_bytes
        hash_ids = self._ids(hasher, prompt[:num_whole_bytes])
        last_ids = self._ids(hasher.copy(), prompt[num_whole_bytes:])
        for output in request.outputs:
            rest = prompt[num_whole_bytes:] + np.array(output[:-1], dtype=np.int32).tobytes()
            yield (
                msgspec.json.encode(
                    {
                        "timestamp": timestamp_ms,
                        "input_length": len(request.prompt),
                        "output_length": len(output),
                        "hash_ids": hash_ids + last_ids,
                        "output_hash_ids": self._ids(hasher.copy(), rest),
                        "block_tokens": self._block_tokens,
                        "namespace": namespace_id,
                        "priority": request.priority,
                    }
                )
                + b"\n"
            )

    def _ids(self, hasher: hashlib.blake2b, tokens: bytes) -> list[int]:
        """Return one id per block of `tokens`. The last block may be partial.

        Effects: `hasher` is updated with all tokens.
        """
        ids = []
        for start in range(0, len(tokens), self._block_bytes):
            hasher.update(tokens[start : start + self._block_bytes])
            ids.append(int.from_bytes(hasher.digest(), "big") >> (8 * _DIGEST_BYTES - _ID_BITS))
        return ids
