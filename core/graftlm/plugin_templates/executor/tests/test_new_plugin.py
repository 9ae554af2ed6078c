"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import psutil
from graftlm.testing import ExecutorConformance
from graftlm.testing.fake_ranks import fake_executor

from graftlm_new_plugin import provide_executors
from graftlm_new_plugin.processes import PrefixedProcesses, PrefixOptions


class TestContract(ExecutorConformance):
    def create(self, context):
        (provider,) = provide_executors()
        return provider.create(provider.options(), context)


def test_the_prefix_starts_each_process():
    found = []

    def create(context):
        found.append(PrefixedProcesses(context.launches, PrefixOptions(prefix=["nice", "-n", "5"]).prefix))
        return context.run_on(found[0])

    executor = fake_executor(2, create)
    try:
        pids = [int(found[0].place(rank).removeprefix("pid ")) for rank in range(2)]
        assert [psutil.Process(pid).nice() for pid in pids] == [5, 5]
    finally:
        executor.close()
