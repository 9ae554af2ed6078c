"""Lets prompts advance as far as the features of their pictures are computed, and requests missing features."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from graftlm.media.request_media import MediaItem
from graftlm.memory import FeaturePool
from graftlm.plan import MediaResult, MediaWork, StepPlan, StepResult
from graftlm.scheduling.request import Request

__all__ = ["MediaFeeding"]

#: The tower's share of a step with running requests, as a fraction of the median time of these steps.
_SHARE: Final = 0.5
_MIN_S: Final = 0.001
#: Maximum time of the tower in a step without running requests. A new request waits for the end of the step.
_ALONE_S: Final = 0.25
_NUM_TIMES: Final = 31


class MediaFeeding:
    """Decides when the features of pictures are computed, and when they are deleted.

    A running request acquires the features that its next tokens need. It releases them when all of their tokens are
    planned, or when it leaves its row. A chunk of its prompt ends before the first token whose features are not ready.

    Args:
        pool: the memory for features.
    """

    def __init__(self, pool: FeaturePool) -> None:
        self.pool = pool
        self._held: dict[int, dict[int, bytes]] = {}  # row -> index of the picture -> key
        self._begin: list[MediaItem] = []
        self._released: list[bytes] = []
        self._step_times: deque[float] = deque(maxlen=_NUM_TIMES)

    @property
    def has_pending(self) -> bool:
        """Whether features are being computed."""
        return self.pool.num_pending > 0

    def reach(self, request: Request, start: int, end: int, most: int) -> int:
        """Return the end of the chunk that a request can compute from `start`; `start` if it must wait.

        Args:
            end: end of the chunk by the step's budget.
            most: end of the chunk by the known tokens and the memory, at least `end`. A chunk may exceed the budget so
                that it contains a whole run of feature tokens whose attention is not causal.

        Effects: acquires features of the pictures before `end`, and releases those of the pictures before `start`.
        """
        media = request.media
        if media is None:
            return end
        if media.whole_runs:
            run = media.run_around(end)
            if run is not None:
                end = run[0] if run[0] > start else run[1]
            if end > most:
                return start
        held = self._held.setdefault(request.held_row, {})
        bounds = zip(media.items, media.first_positions, media.last_positions, strict=True)
        for i, (item, first, last) in enumerate(bounds):
            if last < start:
                self._release(held, i)
            elif first < end and not self._is_ready(held, i, item):
                return max(start, min(end, first))
        return end

    def planned(self, request: Request, end: int) -> None:
        """Release the features whose tokens are all planned: those before `end`.

        The features stay in memory until the plan is built, because the plan still uses them.
        """
        media, held = request.media, self._held.get(request.held_row)
        if media is None or not held:
            return
        for i in [i for i in held if media.last_positions[i] < end]:
            self._released.append(held.pop(i))

    def leave(self, row: int) -> None:
        """Release all features of a request that leaves its row."""
        self._released += self._held.pop(row, {}).values()

    def take_work(self, *, has_running: bool) -> MediaWork | None:
        """Return the work for the step that is being planned; None if there is nothing to compute or to delete.

        Args:
            has_running: whether the step computes tokens of requests.
        """
        released, self._released = self._released, []
        begin, self._begin = tuple(self._begin), []
        dropped = self.pool.take_dropped()
        for key in released:
            self.pool.release(key)
        if not begin and not dropped and not self.has_pending:
            return None
        return MediaWork(dropped, begin, self._slice_s() if has_running else _ALONE_S)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Record the features that a step has completed, and its duration."""
        found = result.media
        if plan.num_tokens and not plan.num_prefill_tokens:
            self._step_times.append(result.model_s - (0.0 if found is None else found.tower_s))
        if found is not None:
            self.pool.set_ready(found.ready)

    def failed(self, result: MediaResult, running: Sequence[Request]) -> list[tuple[Request, str]]:
        """Return the running requests whose pictures could not be computed, each with the error."""
        found = []
        for key, error in result.errors.items():
            found += [(request, error) for request in running if key in self._held.get(request.held_row, {}).values()]
            self.pool.fail(key)
        return found

    def clear(self) -> None:
        """Drop all features, because steps were dropped, or running requests have left their rows."""
        self._held.clear()
        self._begin.clear()
        self._released.clear()
        self.pool.clear()

    def _is_ready(self, held: dict[int, bytes], i: int, item: MediaItem) -> bool:
        """Return whether the features of a picture are ready. If they are missing, request them if there is room."""
        if i not in held:
            is_new = not self.pool.holds(item.key)
            if not self.pool.acquire(item.key, item.num_features):
                return False
            held[i] = item.key
            if is_new:
                self._begin.append(item)
        return self.pool.is_ready(item.key)

    def _release(self, held: dict[int, bytes], i: int) -> None:
        key = held.pop(i, None)
        if key is not None:
            self._released.append(key)

    def _slice_s(self) -> float:
        if not self._step_times:
            return _MIN_S
        return max(_MIN_S, _SHARE * median(self._step_times))
