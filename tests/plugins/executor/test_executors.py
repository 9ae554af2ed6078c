"""The built-in executors keep the contract."""

import pytest

from graftlm.contracts import ExecutorCapabilities
from graftlm.errors import ConfigError
from graftlm.registry import Registry
from graftlm.testing import ExecutorConformance
from graftlm.testing.fake_ranks import fake_executor, fake_plan
from graftlm_executor import provide_executors
from graftlm_executor.options import ProcessesOptions
from graftlm_executor.processes import LocalProcesses

PROVIDERS = {provider.name: provider for provider in provide_executors()}


class TestLocal(ExecutorConformance):
    capabilities = ExecutorCapabilities(max_ranks=1)

    def create(self, context):
        return PROVIDERS["local"].create(None, context)


@pytest.mark.full
class TestProcesses(ExecutorConformance):
    def create(self, context):
        return PROVIDERS["processes"].create(ProcessesOptions(), context)


def test_the_executors_are_installed():
    registry = Registry.load()
    assert registry.names("executor") == ["local", "processes"]


@pytest.mark.parametrize(
    ("cpus", "sets"),
    [
        (None, [None, None]),
        (["0-2", "3,5"], [{0, 1, 2}, {3, 5}]),
        ([0, 1], [{0}, {1}]),
    ],
)
def test_cpus_are_lists_of_ranges(cpus, sets):
    assert ProcessesOptions(cpus=cpus).cpu_sets(2) == sets


@pytest.mark.parametrize("cpus", [["a"], ["3-1"], [""], ["-1"]])
def test_other_cpus_are_refused(cpus):
    with pytest.raises(ValueError, match="must be a list of CPUs"):
        ProcessesOptions(cpus=cpus)


def test_there_is_a_list_of_cpus_for_each_rank():
    with pytest.raises(ConfigError, match="has 1 lists, but there are 2 ranks"):
        ProcessesOptions(cpus=["0"]).cpu_sets(2)


@pytest.mark.full
def test_a_rank_runs_on_its_cpus():
    import psutil

    found = []

    def create(context):
        found.append(LocalProcesses(context.launches, [frozenset({0}), frozenset({1})]))
        return context.run_on(found[0])

    executor = fake_executor(2, create)
    try:
        executor.submit(fake_plan(0)).result()
        pids = [int(found[0].place(rank).removeprefix("pid ")) for rank in range(2)]
        assert [psutil.Process(pid).cpu_affinity() for pid in pids] == [[0], [1]]
    finally:
        executor.close()
