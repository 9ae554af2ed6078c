"""The communicators over gloo and shared memory keep the contract, and the kit finds broken communicators."""

import os
from types import MappingProxyType

import pytest
import torch

from graftlm.layers.kernel_build import user_cache_dir
from graftlm.parallel.shared_communicator import SharedCommunicator, join_shared_memory
from graftlm.testing import CommunicatorConformance, run_conformance
from graftlm.testing.rank_threads import gloo_communicator, run_ranks

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.full
class TestGloo(CommunicatorConformance):
    def create(self, folder, rank, size, timeout_s):
        return gloo_communicator(folder, rank, size, timeout_s)


@pytest.mark.full
class TestSharedMemory(CommunicatorConformance):
    def create(self, folder, rank, size, timeout_s):
        others = gloo_communicator(folder, rank, size, 30.0)
        found = join_shared_memory(others, folder / "shared", "g++", user_cache_dir(os.environ))
        assert isinstance(found, SharedCommunicator)
        found.timeout_s = timeout_s
        return found


def test_sums_through_shared_memory_are_added_in_the_order_of_the_ranks(tmp_path):
    path = tmp_path / "shared"

    def add(it):
        shared = join_shared_memory(it, path, "g++", user_cache_dir(os.environ))
        parts = [torch.randn(700_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        found = [shared.all_reduce(parts[it.rank].to(dtype, copy=True)) for dtype in DTYPES]
        wide = [sum((part.to(dtype).float() for part in parts[1:]), parts[0].to(dtype).float()) for dtype in DTYPES]
        shared.close()
        return [torch.equal(one, two.to(one.dtype)) for one, two in zip(found, wide, strict=True)]

    assert run_ranks(3, add) == [[True, True]] * 3
    assert not path.exists()


def test_without_shared_memory_the_other_communicator_is_used(tmp_path):
    def join(it):
        return join_shared_memory(it, tmp_path / "missing" / "shared", "g++", user_cache_dir(os.environ)) is it

    assert run_ranks(2, join) == [True, True]


class Broken:
    """A communicator with one broken method."""

    def __init__(self, inner, name, method):
        self._inner, self._name, self._method = inner, name, method

    def __getattr__(self, name):
        if name == self._name:
            return lambda *args: self._method(self._inner, *args)
        return getattr(self._inner, name)


def ignores_failures(it, tensor, operation="sum"):
    try:
        return it.all_reduce(tensor, operation)
    except Exception:
        return tensor


def closes_nothing(it):
    """Leave the group open."""


FAULTS = [
    ("all_reduce", lambda it, x, op="sum": it.all_reduce(x.clone(), op), "test_all_reduce_adds"),
    ("all_reduce", lambda it, x, op="sum": it.all_reduce(x, "max"), "test_all_reduce_adds"),
    ("all_reduce", lambda it, x, op="sum": it.all_reduce(x, "max"), "test_all_reduce_takes_the_extremes"),
    ("all_reduce", lambda it, x, op="sum": it.all_reduce(x, op).add_(it.rank * 1e-3), "test_all_reduce_adds"),
    ("all_gather", lambda it, x: it.all_gather(x).flip(0), "test_all_gather_orders_by_rank"),
    ("reduce_scatter", lambda it, x: it.reduce_scatter(x.flip(0)), "test_reduce_scatter_adds_the_own_part"),
    ("all_to_all", lambda it, x, s, r: it.all_to_all(x, s, r).flip(0), "test_all_to_all_exchanges_rows"),
    ("receive", lambda it, x, rank: it.receive(x.clone(), rank) * 0 + x, "test_messages_arrive_in_order"),
    ("broadcast", lambda it, x, rank: it.broadcast(x, 0), "test_broadcast_copies_from_any_rank"),
    ("all_reduce", ignores_failures, "test_a_missing_call_raises_at_the_deadline"),
    ("all_reduce", ignores_failures, "test_the_end_of_a_rank_raises"),
    ("close", closes_nothing, "test_a_closed_communicator_refuses_calls"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "method", "sentence"), FAULTS)
def test_a_broken_communicator_is_found(name, method, sentence):
    class Kit(CommunicatorConformance):
        parameters = MappingProxyType({"size": (2,), "dtype": (torch.float32,), "num_elements": (7,)})

        def create(self, folder, rank, size, timeout_s):
            return Broken(gloo_communicator(folder, rank, size, timeout_s), name, method)

    failed = {result.name.partition("[")[0] for result in run_conformance(Kit) if result.error}
    assert sentence in failed
