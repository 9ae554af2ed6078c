"""The conformance kit of communicators."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from graftlm.contracts import Communicator
from graftlm.errors import RankFailedError
from graftlm.testing.conformance import Conformance
from graftlm.testing.rank_threads import run_ranks

__all__ = ["CommunicatorConformance"]

#: Deadline of the communicators in tests of faults, and the maximum time until the error is raised.
_TIMEOUT_S: Final = 0.5
_LIMIT_S: Final = 5.0


class CommunicatorConformance(Conformance, ABC):
    """The kit for the contract `Communicator`. Each rank is a thread.

        class TestMyCommunicator(CommunicatorConformance):
            def create(self, folder, rank, size, timeout_s):
                return MyCommunicator(folder / "store", rank, size, timeout_s)

    Attributes:
        parameters: `size` is the number of ranks; `dtype` the dtype of tensors; `num_elements` their size.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {
        "size": (2, 3),
        "dtype": (torch.float32, torch.bfloat16),
        "num_elements": (1, 7, 5000),
    }

    @abstractmethod
    def create(self, folder: Path, rank: int, size: int, timeout_s: float) -> Communicator:
        """Return the communicator of a rank.

        Args:
            folder: folder that only the ranks of this group use.
            rank, size: place of the rank, and number of ranks.
            timeout_s: deadline of all calls.
        """

    def _run(self, size: int, function: Callable[[Communicator], Any], timeout_s: float = 30.0) -> list[Any]:
        return run_ranks(size, function, create=self.create, timeout_s=timeout_s)

    def test_ranks_are_counted_from_zero(self, size: int) -> None:
        """`rank`, `size` and `timeout_s` are those of the group."""
        found = self._run(size, lambda it: (it.rank, it.size, it.timeout_s), 20.0)
        assert found == [(rank, size, 20.0) for rank in range(size)]

    def test_all_reduce_adds(self, size: int, dtype: torch.dtype, num_elements: int) -> None:
        """`all_reduce` returns the sum over all ranks, in place, with equal bits on all ranks and in all runs."""
        parts = [_drawn(num_elements, dtype, rank) for rank in range(size)]
        expected = torch.stack(parts).double().sum(0)

        def reduce(it: Communicator) -> Tensor:
            own = parts[it.rank].clone()
            assert it.all_reduce(own) is own, "all_reduce returned another tensor"
            return own

        runs = [self._run(size, reduce) for _ in range(2)]
        torch.testing.assert_close(runs[0][0].double(), expected, rtol=0.02, atol=0.05)
        for run in runs:
            for found in run:
                assert torch.equal(found, runs[0][0]), "ranks or runs differ in bits"

    def test_all_reduce_takes_the_extremes(self, size: int) -> None:
        """`all_reduce` returns the minimum or maximum over all ranks."""

        def reduce(it: Communicator) -> list[Tensor]:
            own = torch.tensor([it.rank, -it.rank])
            return [it.all_reduce(own.clone(), "min"), it.all_reduce(own.clone(), "max")]

        for low, high in self._run(size, reduce):
            assert low.tolist() == [0, 1 - size]
            assert high.tolist() == [size - 1, 0]

    def test_all_gather_orders_by_rank(self, size: int, dtype: torch.dtype, num_elements: int) -> None:
        """`all_gather` returns the tensors of all ranks in the order of the ranks."""
        parts = [_drawn(num_elements, dtype, rank) for rank in range(size)]
        for found in self._run(size, lambda it: it.all_gather(parts[it.rank])):
            assert torch.equal(found, torch.stack(parts))

    def test_reduce_scatter_adds_the_own_part(self, size: int) -> None:
        """`reduce_scatter` returns the sum over all ranks of their `tensor[rank]`."""
        whole = torch.arange(float(2 * size)).view(size, 2)
        for rank, found in enumerate(self._run(size, lambda it: it.reduce_scatter(whole + it.rank))):
            assert torch.equal(found, size * whole[rank] + sum(range(size)))

    def test_all_to_all_exchanges_rows(self, size: int) -> None:
        """`all_to_all` sends consecutive rows to each rank. Their numbers differ, and some are 0."""

        def exchange(it: Communicator) -> list[float]:
            num_sent = [(it.rank + other) % (size + 1) for other in range(size)]
            rows = [float(10 * it.rank + other) for other in range(size) for _ in range(num_sent[other])]
            values: list[float] = it.all_to_all(torch.tensor(rows), num_sent, num_sent).tolist()
            return values

        for rank, found in enumerate(self._run(size, exchange)):
            expected = [float(10 * other + rank) for other in range(size) for _ in range((other + rank) % (size + 1))]
            assert found == expected

    def test_messages_arrive_in_order(self) -> None:
        """`receive` returns what the other rank sends, in the order of the calls."""

        def talk(it: Communicator) -> list[float]:
            if it.rank == 0:
                for value in (1.0, 2.0):
                    it.send(torch.tensor([value]), 1)
                return []
            return [float(it.receive(torch.zeros(1), 0)) for _ in range(2)]

        assert self._run(2, talk)[1] == [1.0, 2.0]

    def test_broadcast_copies_from_any_rank(self, size: int) -> None:
        """`broadcast` replaces the tensor by that of a rank, on all ranks."""
        for source in range(size):
            call = partial(_broadcast_rank, source)
            for found in self._run(size, call):
                assert found.tolist() == [source]

    def test_a_missing_call_raises_at_the_deadline(self, size: int) -> None:
        """If a rank makes no matching call in time, the calls of all other ranks raise, and so do all later calls."""
        gone = threading.Event()

        def call(it: Communicator) -> None:
            if it.rank == size - 1:
                gone.wait(_LIMIT_S + 1)
                return
            start_s = time.monotonic()
            _expect_failure(lambda: it.all_reduce(torch.ones(3)))
            taken_s = time.monotonic() - start_s
            _expect_failure(lambda: it.broadcast(torch.ones(3), 0))
            if it.rank == 0:
                gone.set()
            assert taken_s < _LIMIT_S, f"the call raised after {taken_s:.1f} s"

        self._run(size, call, _TIMEOUT_S)

    def test_the_end_of_a_rank_raises(self, size: int) -> None:
        """If a rank ends, the calls of all other ranks raise before the deadline, and so do all later calls."""

        def call(it: Communicator) -> None:
            it.all_reduce(torch.ones(1))
            if it.rank == size - 1:
                return
            start_s = time.monotonic()
            _expect_failure(lambda: it.all_reduce(torch.ones(3)))
            _expect_failure(lambda: it.all_gather(torch.ones(3)))
            assert time.monotonic() - start_s < _LIMIT_S

        self._run(size, call, _TIMEOUT_S)

    def test_a_closed_communicator_refuses_calls(self) -> None:
        """After `close`, every call raises."""

        def call(it: Communicator) -> None:
            it.close()
            _expect_failure(lambda: it.all_reduce(torch.ones(1)))

        self._run(2, call)


def _expect_failure(call: Callable[[], object]) -> None:
    try:
        call()
    except RankFailedError:
        return
    raise AssertionError("the call did not raise RankFailedError")


def _broadcast_rank(source: int, it: Communicator) -> Tensor:
    return it.broadcast(torch.tensor([it.rank]), source)


def _drawn(num_elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed)).to(dtype)
