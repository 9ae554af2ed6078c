"""Chooses by a hash of the request's key or of the start of its prompt, with bounded loads.

Each pair of a key and a replica has a pseudo-random score, and the replica with the highest score is chosen (rendezvous
hashing: Thaler, Ravishankar, 1998). If a replica fails, only its own keys move. A replica with too many requests is
passed over, so a popular key spreads to further replicas (consistent hashing with bounded loads: Mirrokni, Thorup,
Zadimoghaddam, SODA 2018).
"""

import hashlib
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import ReplicaStates, RoutedRequest, RoutingPolicy
from graftlm_routing.options import ConsistentHashOptions

__all__ = ["ConsistentHash"]

_MASK: Final = 2**64 - 1


class ConsistentHash(RoutingPolicy):
    """Sends requests with the same key, or with the same first `prefix_tokens` tokens, to the same replica."""

    def __init__(self, options: ConsistentHashOptions, num_replicas: int) -> None:
        self.block_tokens = options.prefix_tokens
        self._load_factor = options.load_factor
        self._replica_hashes = _scrambled(np.arange(1, num_replicas + 1, dtype=np.uint64))

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the ready replica with the highest score of those below the limit of requests."""
        scores = _scrambled(self._replica_hashes ^ np.uint64(_key_hash(request)))
        allowed = replicas.ready
        if self._load_factor is not None:
            num_ready = int(np.count_nonzero(allowed))
            total = int(replicas.num_requests @ allowed) + 1
            allowed = allowed & (replicas.num_requests < math.ceil(self._load_factor * total / num_ready))
        return int(np.where(allowed, scores, np.uint64(0)).argmax())


def _key_hash(request: RoutedRequest) -> int:
    if request.key is None and request.digests:
        return request.digests[0] & _MASK
    name = request.token_ids.tobytes() if request.key is None else request.key.encode("utf-8", "surrogatepass")
    namespace = request.namespace.encode("utf-8", "surrogatepass")
    hasher = hashlib.blake2b(len(namespace).to_bytes(8, "big") + namespace, digest_size=8)
    hasher.update(name)
    return int.from_bytes(hasher.digest(), "big")


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudo-random numbers above 0 for different values (the finalizer of SplitMix64)."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)
