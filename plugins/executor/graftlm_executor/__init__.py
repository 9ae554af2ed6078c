"""The built-in executors, which run the ranks of a replica in this process or in processes of this machine."""

from graftlm.contracts import ExecutorCapabilities, ExecutorContext, Provider, StepExecutor
from graftlm.hookspecs import hookimpl
from graftlm_executor.options import ProcessesOptions

__all__ = ["provide_executors"]


def _create_local(options: object, context: ExecutorContext) -> StepExecutor:
    return context.run_here()


def _create_processes(options: ProcessesOptions, context: ExecutorContext) -> StepExecutor:
    from graftlm_executor.processes import LocalProcesses

    return context.run_on(LocalProcesses(context.launches, options.cpu_sets(len(context.launches))))


@hookimpl
def provide_executors() -> list[Provider[StepExecutor]]:
    """Provide `local` and `processes`."""
    return [
        Provider(
            name="local",
            summary="A single rank in the scheduler's process",
            api_version=1,
            create=_create_local,
            capabilities=ExecutorCapabilities(max_ranks=1),
            rank=10,
        ),
        Provider(
            name="processes",
            summary="Each rank in a process of this machine",
            api_version=1,
            create=_create_processes,
            options=ProcessesOptions,
            capabilities=ExecutorCapabilities(),
        ),
    ]
