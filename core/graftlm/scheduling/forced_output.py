"""Appends output by jump-forward, without sampling it."""

import logging
from collections.abc import Callable

from graftlm.errors import RequestError
from graftlm.scheduling.jump_forward import Jump, JumpForward
from graftlm.scheduling.live_requests import LiveRequests
from graftlm.scheduling.planner import Planner
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.request import Request
from graftlm.scheduling.updates import Failure, RequestUpdate

__all__ = ["ForcedOutput"]

logger = logging.getLogger(__name__)


class ForcedOutput:
    """Appends the tokens that a request's grammar forces, instead of sampling them.

    Args:
        jump_forward: finds the forced tokens; None: all output is sampled.
        next_step_id: function that returns the id of the next step to plan.

    Attributes:
        num_tokens: number of tokens appended since the start, minus the number of tokens that they replaced.
    """

    def __init__(
        self,
        jump_forward: JumpForward | None,
        live: LiveRequests,
        queue: WaitingQueue,
        planner: Planner,
        next_step_id: Callable[[], int],
    ) -> None:
        self.num_tokens = 0
        self._jump_forward = jump_forward
        self._live = live
        self._queue = queue
        self._planner = planner
        self._next_step_id = next_step_id

    def extend(self, request: Request, now: float) -> None:
        """Append the tokens that the request's grammar forces next.

        Effects: if the output changes, this request's samples of steps in flight are dropped. The request fails if its
            grammar or the tokenizer fails.
        """
        try:
            jump = None if self._jump_forward is None else self._jump_forward.find(request)
        except RequestError as error:
            self._live.fail(request, str(error), Failure.REQUEST)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the tokenizer is not an Exception; it fails this request only
            logger.exception("jump-forward failed; its request ends")
            self._live.fail(request, f"jump-forward failed: {type(error).__name__}: {error}")
        else:
            if jump is not None:
                self._apply(request, jump, now)

    def _apply(self, request: Request, jump: Jump, now: float) -> None:
        num_dropped, num_gained = len(jump.dropped), len(jump.token_ids) - len(jump.dropped)
        request.replace_latest(num_dropped, jump.token_ids)
        request.jump_forward_tokens += num_gained
        self.num_tokens += num_gained
        request.valid_from_step = self._next_step_id()
        if request.first_token_s is None:
            request.first_token_s = now
        if request.stop_watch is not None:
            request.stop_watch.jump(num_dropped, jump.token_ids, jump.text)
        if request.row is not None:
            self._planner.rewrite(request, request.num_tokens - len(jump.token_ids))
        elif num_dropped:  # the queue's tree has the request at its old tokens, including the dropped ones
            self._queue.remove(request)
            self._queue.add(request)
        changes = RequestUpdate.of(request, jump.token_ids, num_dropped=num_dropped, forced_text=jump.text)
        self._live.updates.append(changes)
