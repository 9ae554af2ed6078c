"""The steps that have been planned and not committed."""

from collections import deque

from graftlm.errors import InvariantError
from graftlm.plan import StepPlan
from graftlm.scheduling.request import Request

__all__ = ["StepsInFlight"]


class StepsInFlight:
    """Keeps steps in the order in which they were planned, which is the order of their commits.

    Attributes:
        num_planned: steps since the start; the id of the next one.
    """

    def __init__(self) -> None:
        self.num_planned = 0
        self._steps: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first(self) -> tuple[StepPlan, tuple[Request, ...]] | None:
        """The next step to commit, with its requests in the order of the plan's rows; None without steps."""
        return self._steps[0] if self._steps else None

    def add(self, plan: StepPlan, requests: tuple[Request, ...]) -> None:
        """Append a planned step."""
        for request in requests:
            request.num_in_flight += 1
        self._steps.append((plan, requests))
        self.num_planned += 1

    def remove_first(self, plan: StepPlan) -> tuple[Request, ...]:
        """Remove the first step; return its requests.

        Raises:
            InvariantError: `plan` is not the first step.
        """
        expected, requests = self._steps.popleft()
        if expected is not plan:
            raise InvariantError(f"step {plan.step_id} is committed before step {expected.step_id}")
        for request in requests:
            request.num_in_flight -= 1
        return requests

    def clear(self) -> None:
        """Forget every step."""
        self._steps.clear()
