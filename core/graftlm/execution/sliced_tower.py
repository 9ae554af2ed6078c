"""Runs a tower in slices: it stops between two of its stages when the time of a slice is over."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.contracts import MediaTower

__all__ = ["SlicedTower"]


class _ClosedError(BaseException):
    """Ends a computation whose tower is closed or whose result is no longer needed."""


class SlicedTower:
    """Computes the features of one picture at a time, in a thread that only runs inside `advance`.

    The caller and this thread never run at the same time, so that they do not compete for cores.

    Args:
        tower: the tower. Forward hooks on its `stages` stop its thread.
        clock: monotonic clock in seconds.
    """

    def __init__(self, tower: MediaTower, clock: Callable[[], float] = time.monotonic) -> None:
        self._tower = tower
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._may_run = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._inputs: Mapping[str, Tensor] = {}
        self._result: Tensor | BaseException | None = None
        self._is_computing = False
        self._is_cancelled = False
        self._end_s = self._stage_start_s = 0.0
        self._has_stage = False  # whether the current slice has computed a stage
        for stage in tower.stages:
            stage.register_forward_pre_hook(self._between_stages)

    @property
    def is_computing(self) -> bool:
        """Whether a picture is partly computed."""
        return self._is_computing

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        """Set the inputs of the next picture; `advance` computes it. No other picture may be partly computed."""
        self._inputs, self._result, self._is_computing, self._is_cancelled = inputs, None, True, False

    def advance(self, max_s: float) -> Tensor | BaseException | None:
        """Compute for about `max_s` seconds, at least one stage.

        Returns: the features if they are complete, [num_features, width]; the exception of the tower; or None.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="graftlm-tower", daemon=True)
            self._thread.start()
        self._has_stage = False
        self._stage_start_s = self._clock()
        self._end_s = self._stage_start_s + max_s
        self._may_run.release()
        self._has_stopped.acquire()
        result, self._result = self._result, None
        return result

    def cancel(self) -> None:
        """Discard a partly computed picture."""
        if self._is_computing:
            self._is_cancelled = True
            if self._thread is not None:
                self.advance(0.0)
            self._is_computing = False

    def close(self) -> None:
        """End the thread."""
        self.cancel()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inputs = {}
            self._is_cancelled = True
            self._may_run.release()
            thread.join()

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                self._may_run.acquire()
                if self._is_cancelled and not self._is_computing:
                    return
                self._result = self._compute()
                self._is_computing = False
                self._has_stopped.release()

    def _compute(self) -> Tensor | BaseException | None:
        try:
            if self._is_cancelled:
                return None
            return self._tower.features(self._inputs)
        except _ClosedError:
            return None
        except Exception as error:  # a checkpoint's tower may raise any exception; it fails only this picture
            return error

    def _between_stages(self, *args: Any) -> None:
        """Stop before a stage if the slice would end before the stage does."""
        if threading.current_thread() is not self._thread:
            return
        now = self._clock()
        stage_s = now - self._stage_start_s
        self._stage_start_s = now
        if self._has_stage and now + stage_s > self._end_s:
            self._has_stopped.release()
            self._may_run.acquire()
            if self._is_cancelled:
                raise _ClosedError
        self._has_stage = True
