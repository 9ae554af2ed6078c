"""The worker of a rank: the object that runs plans with the rank's part of the model."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from graftlm.contracts import Communicator
from graftlm.execution.executor import Runner
from graftlm.parallel.protocol import RankSetup

__all__ = ["CreateWorker", "RankWorker"]


class RankWorker(Protocol):
    """Runs plans and operations. One thread calls all methods."""

    @property
    def runner(self) -> Runner:
        """The runner of plans."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Properties of the rank as plain data, for the scheduler."""
        ...

    def call(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Run an operation between two steps, and return plain data.

        Raises:
            GraftlmError: the operation failed without an effect on later steps.
            Exception: the operation failed, and the rank cannot continue.
        """
        ...


#: Creates the worker of a rank. Arguments: the setup, the communicator (None for a single rank), and a function that is
#: called with the name of each stage of the start.
CreateWorker = Callable[[RankSetup, Communicator | None, Callable[[str], None]], RankWorker]
