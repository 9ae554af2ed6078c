"""A scheduler process, which receives messages, runs the steps of one replica, and sends tokens."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graftlm.assembly.engine_parts import EngineParts
from graftlm.checkpoint import read_tensors
from graftlm.checkpoint.tensor_memory import map_tensors
from graftlm.contracts import PrefixKey
from graftlm.errors import AdapterError, GraftlmError, ModelError, RequestError
from graftlm.media import from_wire
from graftlm.outputs import completion_ids
from graftlm.processes.adapter_calls import AdapterCalls
from graftlm.processes.channels import Inbox, Outbox
from graftlm.processes.kv_publishing import EventPublisher
from graftlm.processes.messages import (
    Abort,
    Accepted,
    AnyMessage,
    Call,
    Generate,
    Load,
    Opened,
    PromptId,
    Rejected,
    Reply,
    Shutdown,
    TokenBatch,
    UseDetokenizer,
    params_from_wire,
)
from graftlm.processes.profiling import Profiler
from graftlm.processes.routing import CacheReporter
from graftlm.processes.step_metrics import StepMetrics
from graftlm.processes.tree_view import tree_view
from graftlm.scheduling import CompletionId, RequestUpdate

__all__ = ["SchedulerProcess"]

logger = logging.getLogger(__name__)

#: Seconds between two load reports of a working replica.
_LOAD_INTERVAL_S = 0.2


class SchedulerProcess:
    """Alternately handles messages and runs steps of one replica.

    One thread does all work, except the compilation of grammars and the forward passes. Forward passes overlap with the
    work of this thread.
    """

    def __init__(
        self,
        name: str,
        parts: EngineParts,
        metrics: StepMetrics,
        inbox: Inbox,
        to_main: Outbox,
        connect: Callable[[str], Outbox],
        detokenizer: str,
        clock: Callable[[], float],
        events: EventPublisher | None = None,
        reporter: CacheReporter | None = None,
    ) -> None:
        """Connect an engine to its channels.

        Args:
            name: name of this process.
            parts: the engine.
            metrics: measures the steps.
            inbox: receives messages.
            to_main: channel to the main process.
            connect: opens a channel to an endpoint.
            detokenizer: endpoint to which tokens are sent, until a UseDetokenizer message names another one.
            clock: a monotonic clock, in seconds.
            events: publishes the prefix cache's events after each step; None if events are not published.
            reporter: collects the changes of the prefix cache for the main process; None if it needs none.
        """
        self._name = name
        self._parts = parts
        self._loop = parts.loop
        self._metrics = metrics
        self._inbox = inbox
        self._to_main = to_main
        self._connect = connect
        self._to_detokenizer = connect(detokenizer)
        self._clock = clock
        self._events = events
        self._reporter = reporter
        self._adapters = AdapterCalls(parts.adapters, inbox.wake)
        self._profiler = Profiler(parts.loop.run_on_device, name)
        self._num_unfinished: dict[PromptId, int] = {}  # number of completions of each prompt that have not ended
        self._prompt_of: dict[CompletionId, PromptId] = {}
        self._next_load_s = 0.0
        self._reported_idle = False
        self._paused = False
        self._closing = False
        self._calls: Mapping[str, Callable[..., Any]] = {
            "ping": lambda: None,
            "flush_cache": self._loop.flush_cache,
            "pause": self._pause,
            "resume": self._resume,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "tree": self._tree,
            "pin": self._pin,
            "unpin": self._unpin,
            "cache_snapshot": self._cache_snapshot,
            "update_weights": self._update_weights,
            "get_weight": self._get_weight,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "drop_weights": parts.weights.drop,
            "unload_adapter": self._adapters.unload,
            "set_adapters": self._adapters.set_all,
        }

    def run(self, early: Sequence[AnyMessage] = ()) -> None:
        """Handle messages and run steps until a Shutdown message arrives.

        Args:
            early: messages that arrived while the engine was being assembled.

        Raises:
            RankFailedError: the ranks have ended, so that this process must be replaced.
        """
        self._loop.when_executor_fails(self._inbox.wake)
        for message in early:
            self._handle(message)
        while not self._closing:
            for message in self._inbox.receive(self._wait_s()):
                self._handle(message)
            self._loop.check_executor()
            for call, install in self._adapters.take_read():
                self._answer(call, install)
            if self._paused or not self._parts.can_run:
                self._send(self._loop.expire())
            elif self._loop.scheduler.has_work:
                updates = self._loop.step()
                self._loop.check_executor()  # the main process fails all requests of a replica whose ranks have ended
                self._report_cache()  # before the tokens, so that the router knows what their prompts have cached
                self._send(updates)
                self._profiler.step_done()
            self._report_cache()
            if self._events is not None:
                self._events.publish()
            self._report_load()
        self._loop.close()

    def _wait_s(self) -> float | None:
        """Return the seconds to wait for a message: 0 while there is work, else None for no limit."""
        if not self._paused and self._parts.can_run:
            wait_s = self._loop.idle_s
        else:
            deadline_s = self._loop.scheduler.next_deadline_s
            wait_s = None if deadline_s is None else max(0.001, deadline_s - self._clock())
        return wait_s if self._reported_idle or wait_s == 0.0 else min(wait_s or _LOAD_INTERVAL_S, _LOAD_INTERVAL_S)

    def _handle(self, message: AnyMessage) -> None:
        # The message may change the counters, so one more report is needed, even if the process is idle afterwards.
        self._reported_idle = False
        match message:
            case Generate():
                self._generate(message)
            case Abort():
                self._abort(message)
            case Call(name="load_adapter"):
                self._begin_load(message)
            case Call():
                self._answer(message, lambda: self._calls[message.name](**message.arguments))
            case UseDetokenizer():
                self._to_detokenizer.close(deliver=False)
                self._to_detokenizer = self._connect(message.endpoint)
            case Shutdown():
                self._closing = True
            case _:
                logger.error("%s cannot handle a message of type %s", self._name, type(message).__name__)

    def _generate(self, message: Generate) -> None:
        """Queue all completions of a prompt, or refuse the prompt, and report to the main process."""
        intake = self._parts.intake
        try:
            params = params_from_wire(message.params)
            ids = completion_ids(message.prompt_id, params.n)
            prompt = np.frombuffer(message.prompt, dtype=np.int32)
            media = None if message.media is None else from_wire(message.media)
            requests = [
                intake.request(
                    completion_id, prompt, params, message.options, index=index, seed=message.seed, media=media
                )
                for index, completion_id in enumerate(ids)
            ]
            self._loop.add(requests, self._inbox.wake)
        except GraftlmError as error:
            self._reject(message, type(error).__name__, str(error))
        except Exception as error:  # an error of a plugin, such as a grammar backend, fails only this prompt
            logger.exception("request %s could not be queued", message.prompt_id)
            self._reject(message, "RequestFailedError", f"{type(error).__name__}: {error}")
        else:
            self._num_unfinished[message.prompt_id] = len(ids)
            self._prompt_of |= dict.fromkeys(ids, message.prompt_id)
            self._to_detokenizer.send(Opened(completion_ids=ids, params=message.params))
            self._to_main.send(Accepted(prompt_id=message.prompt_id))

    def _reject(self, message: Generate, error: str, text: str) -> None:
        self._to_main.send(Rejected(prompt_id=message.prompt_id, error=error, message=text))

    def _abort(self, message: Abort) -> None:
        ids = list(self._prompt_of) if message.completion_ids is None else message.completion_ids
        for completion_id in ids:
            self._loop.abort(completion_id, message.reason)
        self._send(self._loop.take_updates())

    def _begin_load(self, call: Call) -> None:
        try:
            self._adapters.begin_load(call)
        except AdapterError as error:
            self._to_main.send(Reply(process=self._name, call_id=call.call_id, error=str(error)))

    def _answer(self, call: Call, function: Callable[[], Any]) -> None:
        """Run the function of a call and send its result or its error as the reply."""
        try:
            value = function()
            self._to_main.send(Reply(process=self._name, call_id=call.call_id, value=value))
        except Exception as failure:  # includes a value from a plugin that cannot be encoded
            if not isinstance(failure, RequestError | AdapterError):
                logger.exception("%s failed", call.name)
            error = str(failure) or type(failure).__name__
            self._to_main.send(Reply(process=self._name, call_id=call.call_id, error=error))

    def _pause(self, retract: bool) -> None:
        self._paused = True
        self._send(self._loop.settle())
        if retract:
            self._loop.retract_all()
            self._send(self._loop.take_updates())

    def _resume(self) -> None:
        self._paused = False

    def _pin(self, prompt: bytes, cache_salt: str, adapter: str | None, ttl_s: float) -> int:
        return self._loop.pin(self._prefix_key(prompt, cache_salt, adapter), ttl_s)

    def _unpin(self, prompt: bytes, cache_salt: str, adapter: str | None) -> bool:
        return self._loop.unpin(self._prefix_key(prompt, cache_salt, adapter))

    def _prefix_key(self, prompt: bytes, cache_salt: str, adapter: str | None) -> PrefixKey:
        namespace = self._parts.intake.namespace(cache_salt, adapter)
        return PrefixKey(np.frombuffer(prompt, dtype=np.int32), namespace)

    def _update_weights(
        self, path: str | None, tensors: bytes | None, flush_cache: bool, received: Mapping[str, Any] | None = None
    ) -> str | None:
        """Replace weights; return why requests still cannot run, None if they can."""
        weights = self._parts.weights
        try:
            if path is not None:
                new = weights.checked(path)
            else:
                new = weights.checked(read_tensors(tensors or b"") if received is None else map_tensors(**received))
        except ModelError as error:
            raise RequestError(str(error)) from error
        self._send(self._loop.settle())  # requests exist at this point only if the server is paused
        self._parts.replace_weights(new, flush_cache=flush_cache)
        self._send(self._loop.take_updates())
        return weights.lacking

    def _release_memory(self, tags: Sequence[str], keep_weights: bool) -> None:
        self._send(self._loop.settle())
        self._parts.release_memory(tags, keep_weights=keep_weights)
        self._send(self._loop.take_updates())

    def _resume_memory(self, tags: Sequence[str]) -> str | None:
        """Resume memory; return why requests still cannot run, None if they can when all memory is resumed."""
        self._parts.resume_memory(tags)
        return self._parts.weights.lacking

    def _get_weight(self, weight: str, num_rows: int) -> Any:
        return self._parts.read_weight(weight)[:num_rows].float().tolist()

    def _cache_snapshot(self) -> dict[str, Any]:
        if self._events is None:
            return self._loop.cache_snapshot()
        self._events.publish()
        return self._loop.cache_snapshot() | {"replica": self._name, "next_seq": self._events.next_seq}

    def _tree(self, limit: int) -> dict[str, Any]:
        return tree_view(self._loop.scheduler.kv.cache, limit, self._clock())

    def _send(self, updates: list[RequestUpdate]) -> None:
        known = [update for update in updates if update.request_id in self._prompt_of]
        if not known:
            return
        self._to_detokenizer.send(TokenBatch(updates=known))
        for update in known:
            if update.finish is not None:
                self._forget(update.request_id)

    def _forget(self, completion_id: CompletionId) -> None:
        prompt_id = self._prompt_of.pop(completion_id)
        self._num_unfinished[prompt_id] -= 1
        if not self._num_unfinished[prompt_id]:
            del self._num_unfinished[prompt_id]

    def _report_cache(self) -> None:
        message = None if self._reporter is None else self._reporter.take()
        if message is not None:
            self._to_main.send(message)

    def _report_load(self) -> None:
        """Send the load to the main process every 0.2 s while there is work, and once when the work has ended."""
        now, idle = self._clock(), not self._loop.scheduler.has_work
        if (idle and self._reported_idle) or (not idle and now < self._next_load_s):
            return
        self._next_load_s = now + _LOAD_INTERVAL_S
        self._reported_idle = idle
        load = Load(
            process=self._name,
            stats=self._loop.stats(),
            histograms=self._metrics.snapshot(),
            prefill_tokens=self._metrics.prefill_tokens,
        )
        self._to_main.send(load)
