"""The replicas' radix trees, with the text of their nodes."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from graftlm.processes.tokenizer_manager import TokenizerManager

__all__ = ["TreeReader"]

#: Seconds for which a result is reused, so that additional viewers cause no additional work in the schedulers.
_MAX_AGE_S: Final = 2.0


class TreeReader:
    """Reads the replicas' trees and decodes the tokens of their nodes.

    Args:
        clock: a monotonic clock, in seconds.
        limit: maximum number of nodes per tree. The largest nodes are returned.
    """

    def __init__(self, manager: TokenizerManager, clock: Callable[[], float], limit: int) -> None:
        self._manager = manager
        self._clock = clock
        self._limit = limit
        self._lock = asyncio.Lock()
        self._latest: list[dict[str, Any]] = []
        self._read_s: float | None = None

    async def read(self) -> list[dict[str, Any]]:
        """Return one tree per ready replica: {"replica", "total_nodes", "nodes"}.

        The nodes are those of `tree_view`, with two differences. "text", the text of a node's first tokens, replaces
        "token_ids". "is_cut" is true if the node has more tokens.

        Raises:
            UnavailableError: no replica is ready, or one dies or does not answer.
        """
        async with self._lock:
            if self._read_s is None or self._clock() - self._read_s > _MAX_AGE_S:
                names = [replica.name for replica in self._manager.replicas.ready]
                trees = await self._manager.calls.call_schedulers("tree", limit=self._limit)
                self._latest = await self._manager.preparer.in_thread(lambda: self._with_texts(names, trees))
                self._read_s = self._clock()
            return self._latest

    def _with_texts(self, names: list[str], trees: list[dict[str, Any]]) -> list[dict[str, Any]]:
        decode = self._manager.tokenizer.decode
        return [
            {
                "replica": name,
                "total_nodes": tree["total_nodes"],
                "nodes": [_with_text(node, decode(node["token_ids"], False)) for node in tree["nodes"]],
            }
            for name, tree in zip(names, trees, strict=True)
        ]


def _with_text(node: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of a node with the text of its first tokens instead of their ids."""
    is_cut = node["num_tokens"] > len(node["token_ids"])
    return {key: value for key, value in node.items() if key != "token_ids"} | {"text": text, "is_cut": is_cut}
