"""Runs a function on several ranks: one thread per rank, connected by a real communicator."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from graftlm.contracts import Communicator
from graftlm.parallel.torch_communicator import TorchCommunicator, file_store

__all__ = ["CreateCommunicator", "gloo_communicator", "run_ranks"]

T = TypeVar("T")

#: Creates the communicator of a rank. Arguments: a folder that only the ranks of the group use, the rank, the number of
#: ranks, the deadline in seconds.
CreateCommunicator = Callable[[Path, int, int, float], Communicator]


def gloo_communicator(folder: Path, rank: int, size: int, timeout_s: float) -> Communicator:
    """Return a communicator of CPU tensors; see `CreateCommunicator`."""
    return TorchCommunicator(file_store(folder / "store", size), rank, size, torch.device("cpu"), timeout_s)


def run_ranks(
    size: int,
    function: Callable[[Communicator], T],
    *,
    create: CreateCommunicator = gloo_communicator,
    timeout_s: float = 30.0,
) -> list[T]:
    """Call a function once per rank, at the same time, and return the results in the order of the ranks.

    Args:
        size: number of ranks.
        function: gets the communicator of its rank.
        create: function that creates the communicators.
        timeout_s: deadline of the communicators.

    Raises:
        Exception: the error of the first rank that failed.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    all_created = threading.Barrier(size)

    def run(rank: int, folder: Path) -> None:
        try:
            communicator = create(folder, rank, size, timeout_s)
            try:
                all_created.wait(timeout_s)  # a rank that ends earlier would break the connections of the others
                results[rank] = function(communicator)
            finally:
                communicator.close()
        except BaseException as error:
            all_created.abort()
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=run, args=(rank, Path(folder))) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
