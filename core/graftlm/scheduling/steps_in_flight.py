"""The steps that are planned and not committed."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from graftlm.errors import InvariantError
from graftlm.plan import StepPlan
from graftlm.scheduling.drafting import PlannedDraft
from graftlm.scheduling.request import Request

__all__ = ["StepInFlight", "StepsInFlight"]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A planned step.

    `Scheduler.plan` creates it; the committer reads it when the result of the step arrives.

    Attributes:
        requests: the step's requests, in the order of the plan's rows.
        drafts: row -> the draft that the step verifies.
    """

    plan: StepPlan
    requests: tuple[Request, ...]
    drafts: Mapping[int, PlannedDraft] = field(default_factory=dict)


class StepsInFlight:
    """A queue of steps in the order in which they were planned. They are committed in the same order.

    Attributes:
        num_planned: number of steps planned since the start; it is the id of the next step.
    """

    def __init__(self) -> None:
        self.num_planned = 0
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first(self) -> StepInFlight | None:
        """The next step to commit; None without steps."""
        return self._steps[0] if self._steps else None

    def add(self, step: StepInFlight) -> None:
        """Append a planned step."""
        for request in step.requests:
            request.num_in_flight += 1
        self._steps.append(step)
        self.num_planned += 1

    def remove_first(self, plan: StepPlan) -> StepInFlight:
        """Remove the first step and return it.

        Raises:
            InvariantError: `plan` is not the first step.
        """
        step = self._steps.popleft()
        if step.plan is not plan:
            raise InvariantError(f"step {plan.step_id} is committed before step {step.plan.step_id}")
        for request in step.requests:
            request.num_in_flight -= 1
        return step

    def clear(self) -> None:
        """Remove all steps."""
        self._steps.clear()
