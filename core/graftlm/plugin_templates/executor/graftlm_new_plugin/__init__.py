"""A graftlm plugin: the executor `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import ExecutorCapabilities, ExecutorContext, StepExecutor

from graftlm_new_plugin.processes import PrefixedProcesses, PrefixOptions

__all__ = ["provide_executors"]


def _create(options: PrefixOptions, context: ExecutorContext) -> StepExecutor:
    return context.run_on(PrefixedProcesses(context.launches, options.prefix))


@hookimpl
def provide_executors() -> list[Provider[StepExecutor]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Each rank in a process that another command starts, such as nice or numactl",
            api_version=1,
            create=_create,
            options=PrefixOptions,
            capabilities=ExecutorCapabilities(),
        )
    ]
