"""The handling of requests in the main process, from their preparation to their end."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftlm import errors
from graftlm.chat.chat_formats import ChatFormats
from graftlm.config import EngineConfig
from graftlm.errors import (
    GraftlmError,
    RequestError,
    UnavailableError,
)
from graftlm.intake import Intake
from graftlm.lora.adapters import prefix_namespace
from graftlm.media import MediaPrompts, to_wire
from graftlm.outputs import GatheredOutput
from graftlm.processes.calls import ProcessCalls, Send
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.in_flight import InFlight, InFlightRequests
from graftlm.processes.messages import (
    Abort,
    Accepted,
    AnyMessage,
    CacheChanges,
    Generate,
    Load,
    MessageError,
    PromptId,
    Rejected,
    Reply,
    TextBatch,
    params_to_wire,
)
from graftlm.processes.names import DETOKENIZER
from graftlm.processes.prompt_encoder import PromptEncoder
from graftlm.processes.prompt_traces import request_trace_var
from graftlm.processes.released_memory import ReleasedMemory
from graftlm.processes.replicas import Health, ReplicaSet
from graftlm.processes.request_metrics import RequestMetrics
from graftlm.processes.request_preparer import RequestPreparer
from graftlm.processes.routing import changes_of
from graftlm.processes.served_adapters import ServedAdapters
from graftlm.processes.served_model import ServedModel
from graftlm.processes.served_weights import ServedWeights
from graftlm.processes.trace_lines import FinishedRequest
from graftlm.processes.trace_recorder import TraceRecorder
from graftlm.processes.weight_groups import WeightGroups
from graftlm.prompts import Prompt, TextPair
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import RequestUpdate
from graftlm.tokenization import Tokenizer
from graftlm.types import SamplingParams, TokenIds

__all__ = ["TokenizerManager"]


class TokenizerManager:
    """Sends the requests of HTTP handlers to the scheduler processes, and passes the output to `Generation` objects.

    All methods are called in one event loop.

    Attributes:
        config: the configuration.
        model: the description of the model.
        tokenizer: the tokenizer.
        replicas: the replicas, and the state of the processes.
        chat_formats: the formats of the model's tool calls and reasoning.
        calls: sends calls to the processes, for everything except starting and aborting requests.
        preparer: tokenizes, checks and decodes texts in threads.
        adapters: the adapters that requests may name.
        weights: replaces the model's weights.
        memory: releases and resumes the replicas' memory.
        groups: the trainers' groups that broadcast weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        tokenizer: Tokenizer,
        intake: Intake,
        replicas: ReplicaSet,
        send: Send,
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
        recorder: TraceRecorder | None = None,
        chat_formats: ChatFormats | None = None,
        adapter_digests: Mapping[str, str] | None = None,
        media: MediaPrompts | None = None,
    ) -> None:
        """Initialize the manager.

        Args:
            intake: checks requests.
            send: queues a message for a process.
            metrics: measures the requests.
            clock: a monotonic clock, in seconds.
            recorder: records every request that has generated tokens. The caller closes it.
            adapter_digests: name -> digest of the content of each configured adapter.
            media: tokenizes prompts with pictures; None: such prompts are refused.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.replicas = replicas
        self.chat_formats = chat_formats or ChatFormats()
        self.calls = ProcessCalls(replicas, send)
        self.adapters = ServedAdapters(config.lora.adapters, adapter_digests or {}, self.calls, replicas, send)
        self.preparer = RequestPreparer(PromptEncoder(tokenizer, model.vocab_size, model.context_len, media), intake)
        self._send = send
        self._metrics = metrics
        self._clock = clock
        self._recorder = recorder
        self._counter = itertools.count()
        self._in_flight = InFlightRequests()
        self.weights = ServedWeights(self.calls, replicas, self._in_flight, self.abort_all)
        self.groups = WeightGroups(config, self.weights)
        self.memory = ReleasedMemory(
            self.calls, replicas, self._in_flight, self.weights, self.abort_all, self.pause, self.resume
        )

    # -- for HTTP handlers ---------------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """The state of the server and its current problems."""
        return self.replicas.health

    @property
    def num_requests(self) -> int:
        """Number of prompts that have not ended."""
        return len(self._in_flight)

    def num_requests_above(self, priority: int) -> int:
        """Return the number of prompts that have not ended and whose priority is higher than `priority`."""
        return sum(item.generation.request.options.priority > priority for item in self._in_flight)

    async def prepare(
        self,
        prompt: Prompt | TextPair,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        request_id: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        adapt: Callable[[TokenIds], SamplingParams] | None = None,
        keep_last: int | None = None,
    ) -> PreparedRequest:
        """Tokenize and check a prompt. After this, `start` raises only errors that cannot be detected here.

        Args:
            options: the options. Their timeout is reduced to `server.request_timeout_s` if this is shorter.

        `RequestPreparer.prepare` describes the other arguments.

        Raises:
            AdapterNotFoundError: the adapter does not exist.
            RequestError: the prompt or its parameters are not valid, or the request id is in use.
            UnavailableError: the server is stopping, or checks of other grammars hang.
        """
        self.adapters.check(options.adapter)
        self._check_id(request_id)
        options = options.limited_to(self.config.server.request_timeout_s)
        return await self.preparer.prepare(
            prompt,
            params,
            options,
            request_id=request_id,
            template_args=template_args,
            adapt=adapt,
            keep_last=keep_last,
        )

    async def start(self, request: PreparedRequest) -> Generation:
        """Send a prompt to a replica and wait until it is queued there.

        This method waits while generation is paused, or while no replica is ready but one is being restarted. Then it
        sends the prompt.

        Raises:
            QueueFullError: `scheduling.max_queued_requests` requests already wait in the replica.
            RequestError: the request id is in use, or the request contains invalid Unicode or a number that is too
                large.
            UnavailableError: no replica works, or the server is draining.
        """
        self._check_number(request.params.n)
        arrived_s = self._clock()
        options = request.options
        route = self.replicas.router.route(request.key_token_ids, self._namespace(options), options.routing_key)
        replica = await self.replicas.take(options.timeout_s, route)
        self._check_id(request.request_id)
        prompt_id = PromptId(f"{request.request_id}:{next(self._counter)}")
        generation = Generation(request, prompt_id, self._abort, self.weights.version)
        message = Generate(
            prompt_id=prompt_id,
            prompt=request.key_token_ids.data.cast("B"),
            params=params_to_wire(request.params),
            seed=request.seed,
            options=request.options,
            media=None if request.media is None else to_wire(request.media.media),
        )
        trace = request_trace_var.get()
        prompt_trace = None if trace is None else trace.begin_prompt(request)
        try:
            self._send(replica.name, message)
        except MessageError as error:
            if prompt_trace is not None:
                prompt_trace.cancel()
            message_text = f"the request contains invalid Unicode or a number that is too large: {error.__cause__}"
            raise RequestError(message_text) from error
        self._in_flight.add(InFlight(prompt_id, generation, replica, route, arrived_s, trace=prompt_trace))
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.abort()
            raise
        return generation

    async def start_all(self, requests: Sequence[PreparedRequest]) -> list[Generation]:
        """Start several prompts. If one cannot be started, all are aborted.

        Raises:
            RequestError: the prompts have more completions than fit into the queues, or `start` raised this error.
            GraftlmError: `start` raised this error.
        """
        self._check_number(sum(request.params.n for request in requests))
        starts = [asyncio.ensure_future(self.start(request)) for request in requests]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:  # includes the cancellation of the caller
            for start in starts:
                start.cancel()
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, Generation):
                    outcome.abort()
            raise

    def abort(self, request_id: str) -> None:
        """Abort the request with this id. Unknown ids are ignored."""
        item = self._in_flight.by_request_id(request_id)
        if item is not None:
            item.generation.abort()

    def abort_all(self) -> None:
        """Abort every request."""
        for item in self._in_flight:
            item.generation.abort()

    async def flush_cache(self) -> int:
        """Remove every cached prefix that no running request uses.

        Returns: number of tokens removed, summed over all replicas.

        Raises:
            UnavailableError: no replica is ready, or one dies or does not reply in time.
        """
        return int(sum(await self.calls.call_schedulers("flush_cache")))

    async def pause(self, mode: str) -> None:
        """Stop generating until `resume`. New requests wait.

        Args:
            mode: "abort" aborts all current requests. "in_place" pauses them; they keep their pages. "retract" puts
                them back into the queue; their pages stay cached until they are evicted.

        Raises:
            UnavailableError: a replica does not reply in time.
        """
        self.replicas.pause()
        if mode == "abort":
            self.abort_all()
        await self.calls.call_surviving("pause", retract=mode == "retract")

    async def resume(self) -> None:
        """Continue after `pause`.

        Raises:
            RequestError: memory is released.
            UnavailableError: a replica does not reply in time.
        """
        if self.memory.tags:
            raise RequestError("the server sleeps: resume its memory before you continue generation")
        await self.calls.call_surviving("resume")
        self.replicas.resume()

    # -- for the end of the server -------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until all current requests have ended."""
        self.replicas.drain()
        await self._in_flight.wait_until_empty()

    def close(self) -> None:
        """Fail all current requests, leave all groups, and close the preparer."""
        self.replicas.drain()
        self.groups.close()
        self._fail([*self._in_flight], "the server is stopping")
        self.preparer.close()

    # -- for the launcher ----------------------------------------------------------------------------------------------

    def process_ready(self, name: str) -> None:
        """Handle a process that has become ready for messages."""
        if self.replicas.named(name) is not None:
            self.adapters.restarted(name)
        self.replicas.started(name)
        self.weights.process_ready(name)
        if self.replicas.named(name) is not None:
            self.memory.process_ready(name)

    def process_stuck(self, name: str, seconds: float) -> None:
        """Handle a process that has not answered a ping for this number of seconds."""
        self.replicas.stuck(name, seconds)

    def process_recovered(self, name: str) -> None:
        """Handle a stuck process that answers again."""
        self.replicas.recovered(name)

    def restarts_ended(self) -> None:
        """Handle the end of restarts: fail the requests that wait for a restart."""
        self.replicas.end_restarts()

    def process_died(self, name: str, reason: str) -> None:
        """Fail the requests of a scheduler that died. If the detokenizer died, fail all requests."""
        self.replicas.died(name, reason)
        replica = self.replicas.named(name)
        lost = [item for item in self._in_flight if replica is None or item.replica is replica]
        text = f"{name} died ({reason}); send the request again"
        self._fail(lost, text)
        if replica is not None and lost:
            completion_ids = [completion_id for item in lost for completion_id in item.generation.completion_ids]
            self._send(DETOKENIZER, Abort(completion_ids=completion_ids, reason="their scheduler died"))
        self.calls.process_died(name, text)

    def receive(self, message: AnyMessage) -> None:
        """Handle a message of a process."""
        match message:
            case TextBatch():
                now = self._clock()
                for update, text in zip(message.updates, message.texts, strict=True):
                    self._apply(update, text, now)
            case Accepted():
                item = self._in_flight.by_prompt_id(message.prompt_id)
                if item is not None and not item.generation.accepted.done():
                    item.generation.accepted.set_result(None)
            case Rejected():
                item = self._in_flight.by_prompt_id(message.prompt_id)
                if item is not None:
                    self._end(item, _error_named(message.error, message.message), "rejected")
            case Load():
                replica = self.replicas.named(message.process)
                if replica is not None:
                    replica.report(message)
            case CacheChanges():
                replica = self.replicas.named(message.process)
                if replica is not None:
                    replica.report_cache(changes_of(message))
            case Reply():
                self.calls.answer(message)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _namespace(self, options: RequestOptions) -> str:
        """Return the namespace of a request's cached prefixes, which `Intake.namespace` returns in the replicas."""
        adapter = None if options.adapter is None else self.adapters.get(options.adapter)
        return prefix_namespace(options.cache_salt, None if adapter is None else adapter.digest)

    def _check_id(self, request_id: str | None) -> None:
        if request_id is not None and request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is in use; give every request a different id")

    def _check_number(self, num_completions: int) -> None:
        limit = self.config.scheduling.max_queued_requests * self.config.parallel.data
        if num_completions > limit:
            raise RequestError(
                f"one call requests {num_completions} completions, but at most {limit} requests may wait. Send "
                "several calls, or raise scheduling.max_queued_requests."
            )

    def _apply(self, update: RequestUpdate, text: str, now: float) -> None:
        item = self._in_flight.by_completion_id(update.request_id)
        if item is None:
            return  # this process ended the prompt before the scheduler received the Abort
        generation = item.generation
        generation.apply(update, text)
        if update.token_ids:
            if item.last_token_s is None:
                self._in_flight.first_token(item, now)
                self._metrics.first_token(now - item.arrived_s)
            else:
                self._metrics.more_tokens(now - item.last_token_s, len(update.token_ids))
                item.last_token_s = now
        if generation.finished:
            self._remove(item, generation.outcome)
            if generation.failed:  # other completions of the prompt may still run
                self._abort_completions(item, "the request failed")

    def _abort(self, generation: Generation) -> None:
        item = self._in_flight.by_request_id(generation.request_id)
        if item is not None and item.generation is generation:
            self._abort_completions(item, "aborted")

    def _abort_completions(self, item: InFlight, reason: str) -> None:
        self._send(item.replica.name, Abort(completion_ids=item.generation.completion_ids, reason=reason))

    def _fail(self, items: Sequence[InFlight], text: str) -> None:
        for item in items:
            # Each request gets its own exception object, because raising an exception changes its traceback.
            self._end(item, UnavailableError(text), "unavailable")
            self._abort_completions(item, "the server ended the request")

    def _end(self, item: InFlight, error: GraftlmError, outcome: str) -> None:
        item.generation.fail(error)
        self._remove(item, outcome)

    def _remove(self, item: InFlight, outcome: str) -> None:
        if self._in_flight.remove(item):
            output = item.generation.gathered()
            self._metrics.finished(output, self._clock() - item.arrived_s, outcome)
            if item.trace is not None:
                item.trace.end(output, outcome)
            if self._recorder is not None and item.last_token_s is not None:
                self._recorder.record(_finished_request(item, output))


def _finished_request(item: InFlight, output: GatheredOutput) -> FinishedRequest:
    request = item.generation.request
    options = request.options
    return FinishedRequest(
        prompt=request.key_token_ids,
        outputs=[completion.token_ids for completion in output.completions],
        arrived_s=item.arrived_s,
        namespace=prefix_namespace(options.cache_salt, options.adapter),
        priority=options.priority,
    )


def _error_named(name: str, message: str) -> GraftlmError:
    """Return an error of the class `name` in `graftlm.errors`; a RequestError if there is no such class."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, GraftlmError) else RequestError(message)
