"""The recording of steps in trace files for chrome://tracing and Perfetto."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftlm.errors import RequestError

__all__ = ["Profiler"]

logger = logging.getLogger(__name__)


class Profiler:
    """Records the thread that runs the forward passes, from `start` to `stop` or for a number of steps.

    Args:
        run_on_device: calls a function in the thread that runs the forward passes.
        name: prefix of the names of the trace files.
    """

    def __init__(self, run_on_device: Callable[[Callable[[], None]], None], name: str) -> None:
        self._run = run_on_device
        self._name = name
        self._profile: Any = None
        self._path: Path | None = None
        self._steps_left: int | None = None
        self._written: list[str] = []

    def start(
        self,
        output_dir: str,
        num_steps: int | None = None,
        activities: Sequence[str] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> None:
        """Start a recording.

        Args:
            output_dir: the folder for the trace. It is created if it does not exist.
            num_steps: number of steps after which the recording ends automatically; None if only `stop` ends it.
            activities: "CPU", "GPU" or both. "GPU" is ignored if there is no GPU.
            with_stack: whether to record Python stacks.
            record_shapes: whether to record the shapes of operators' inputs.

        Raises:
            RequestError: a recording is already running.
        """
        if self._profile is not None:
            raise RequestError("a profile is being recorded already; stop it first")
        import torch
        from torch.profiler import ProfilerActivity, profile

        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        chosen = [kinds[a] for a in activities if a != "GPU" or torch.cuda.is_available()]
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        self._path = Path(output_dir) / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
        starting = profile(activities=chosen, with_stack=with_stack, record_shapes=record_shapes)
        self._run(starting.start)
        self._profile, self._steps_left, self._written = starting, num_steps, []

    def step_done(self) -> None:
        """Count a step, and end the recording after `num_steps` steps. An error while writing the trace is logged."""
        if self._steps_left is not None and self._profile is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                try:
                    self._finish()
                except Exception:
                    logger.exception("the profile could not be written to %s", self._path)

    def stop(self) -> list[str]:
        """End the recording, unless it has ended automatically, and return the paths of the trace files.

        Raises:
            RequestError: no recording was started.
        """
        if self._profile is not None:
            self._finish()
        elif not self._written:
            raise RequestError("no profile is being recorded; start one first")
        written, self._written = self._written, []
        return written

    def _finish(self) -> None:
        current, path = self._profile, self._path
        self._profile, self._steps_left = None, None
        self._run(current.stop)
        current.export_chrome_trace(str(path))
        self._written.append(str(path))
