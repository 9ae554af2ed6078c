"""The replicas' radix trees as people read them: with text."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from graftlm.processes.tokenizer_manager import TokenizerManager

__all__ = ["TreeReader"]

#: However many people look, the schedulers walk their trees at most this often.
_MAX_AGE_S: Final = 2.0


class TreeReader:
    """Asks the replicas for their trees and decodes what the nodes hold."""

    def __init__(self, manager: TokenizerManager, clock: Callable[[], float], limit: int) -> None:
        """Take whom to ask.

        Args:
            limit: nodes of a tree at most, the largest.
        """
        self._manager = manager
        self._clock = clock
        self._limit = limit
        self._lock = asyncio.Lock()
        self._latest: list[dict[str, Any]] = []
        self._read_s: float | None = None

    async def read(self) -> list[dict[str, Any]]:
        """Return a tree for each replica that is up: {"replica", "total_nodes", "nodes"}.

        Nodes are as `tree_view` returns them, but with "text" of their first tokens, and "is_cut" when there are more.

        Raises:
            UnavailableError: no replica is up, or one dies or gives no answer.
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
    """Return a node with the text of its first tokens in the tokens' place."""
    is_cut = node["num_tokens"] > len(node["token_ids"])
    return {key: value for key, value in node.items() if key != "token_ids"} | {"text": text, "is_cut": is_cut}
