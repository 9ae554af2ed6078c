"""The main process's end of the engine: prompts in, tokenised and checked, and what comes of them."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from graftlm import errors
from graftlm.chat.chat_formats import ChatFormats
from graftlm.config import EngineConfig
from graftlm.errors import (
    GraftlmError,
    GrammarError,
    RequestError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.intake import Intake, draw_seed
from graftlm.lora.adapters import prefix_namespace
from graftlm.outputs import GatheredOutput
from graftlm.processes.calls import ProcessCalls, Send
from graftlm.processes.check_threads import CheckThreads
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.in_flight import InFlight, InFlightRequests
from graftlm.processes.messages import (
    Abort,
    Accepted,
    AnyMessage,
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
from graftlm.processes.replicas import Health, ReplicaSet
from graftlm.processes.request_metrics import RequestMetrics
from graftlm.processes.served_adapters import ServedAdapters
from graftlm.processes.served_model import ServedModel
from graftlm.processes.trace_lines import FinishedRequest
from graftlm.processes.trace_recorder import TraceRecorder
from graftlm.prompts import Prompt, TextPair
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import RequestUpdate
from graftlm.tokenization import Tokenizer
from graftlm.types import Message, SamplingParams, TokenIds

__all__ = ["TokenizerManager"]

T = TypeVar("T")

#: How long the replacing of weights may take, which may come from slow storage.
UPDATE_TIMEOUT_S = 3600.0
_GRAMMAR_CHECK_TIMEOUT_S = 60.0


class TokenizerManager:
    """Turns what HTTP handlers ask for into messages to the scheduler processes, and their answers into generations.

    Lives in one event loop. Tokenising, checking and decoding run in threads.

    Attributes:
        replicas: the replicas, and whether their processes are well.
        chat_formats: how the model writes tool calls and reasoning.
        calls: questions to the processes, about no request.
        weight_version: what answers call the model's weights.
        adapters: those that requests may ask for.
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
    ) -> None:
        """Join the parts.

        Args:
            adapter_digests: of the content of the configured adapters, by name.
            recorder: takes down every request that has generated something; whoever opened it closes it.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.replicas = replicas
        self.weight_version = "default"
        self.chat_formats = chat_formats or ChatFormats()
        self.calls = ProcessCalls(replicas, send)
        self.adapters = ServedAdapters(config.lora.adapters, adapter_digests or {}, self.calls, replicas, send)
        self._encoder = PromptEncoder(tokenizer, model.vocab_size, model.context_len)
        self._intake = intake
        self._send = send
        self._metrics = metrics
        self._clock = clock
        self._recorder = recorder
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="graftlm-tokenizer")
        self._grammar_threads = CheckThreads(num_threads=2, timeout_s=_GRAMMAR_CHECK_TIMEOUT_S)
        self._is_closed = False
        self._counter = itertools.count()
        self._in_flight = InFlightRequests()
        self._updating = asyncio.Lock()
        self._weights_changed = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -- for HTTP handlers ---------------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """Whether requests are served, and what is wrong."""
        return self.replicas.health

    @property
    def num_requests(self) -> int:
        """Prompts that have not ended."""
        return len(self._in_flight)

    async def prepare(
        self,
        prompt: Prompt | TextPair,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        request_id: str | None = None,
        template_args: dict[str, Any] | None = None,
        adapt: Callable[[TokenIds], SamplingParams] | None = None,
    ) -> PreparedRequest:
        """Tokenise and check a prompt in one thread, so that `start` can hardly fail.

        Args:
            prompt: text, a pair of texts, token ids, or chat messages, which the checkpoint's chat template renders.
            params: their grammar, or its absence, is that of what `adapt` returns.
            adapt: returns the parameters for a prompt's token ids, in the place of `params`; runs in that thread.
            options: the shorter of their timeout and `server.request_timeout_s` counts.
            template_args: further variables of the chat template.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            RequestError: something is wrong with the prompt or its parameters.
        """
        self.adapters.check(options.adapter)
        self._check_id(request_id)

        def check() -> PreparedRequest:
            pooling = options.pooling
            token_ids = self._intake.check_prompt(self._encoder.encode(prompt, template_args or {}), pooling=pooling)
            checked, unenforced = self._intake.check_params(params if adapt is None else adapt(token_ids))
            self._intake.check_room(len(token_ids), checked, pooling=pooling)
            return PreparedRequest(
                request_id=uuid.uuid4().hex if request_id is None else request_id,
                prompt_token_ids=token_ids,
                params=checked,
                seed=draw_seed() if params.seed is None else params.seed,
                options=options.limited_to(self.config.server.request_timeout_s),
                unenforced=unenforced,
            )

        return await self.in_thread(check, has_grammar=params.grammar_field is not None)

    async def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters alone, as `prepare` does.

        Raises:
            RequestError: something is wrong with them.
        """
        await self.in_thread(lambda: self._intake.check_params(params), has_grammar=params.grammar_field is not None)

    async def enforces(self, params: SamplingParams) -> bool:
        """Whether the grammar of sampling parameters is one that this engine could enforce."""
        try:
            await self.check_params(params)
        except (GrammarError, UnsupportedFeatureError):
            return False
        return True

    async def start(self, request: PreparedRequest) -> Generation:
        """Hand a prompt to a replica and wait until it is queued there.

        Waits for a replica that is being started again, when none is ready, and while generation is paused.

        Raises:
            QueueFullError: max_queued_requests are waiting.
            RequestError: the id is in use, or something in the request is no Unicode or too large a number.
            UnavailableError: no replica is up, or the server is draining.
        """
        self._check_number(request.params.n)
        arrived_s = self._clock()
        replica = await self.replicas.take(request.options.timeout_s)
        self._check_id(request.request_id)
        prompt_id = PromptId(f"{request.request_id}:{next(self._counter)}")
        generation = Generation(request, prompt_id, self._abort, self.weight_version)
        message = Generate(
            prompt_id=prompt_id,
            prompt=request.prompt_token_ids.data.cast("B"),
            params=params_to_wire(request.params),
            seed=request.seed,
            options=request.options,
        )
        try:
            self._send(replica.name, message)
        except MessageError as error:
            raise RequestError(f"the request holds what is no Unicode, or too large: {error.__cause__}") from error
        self._in_flight.add(InFlight(prompt_id, generation, replica, arrived_s))
        self._idle.clear()
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.abort()
            raise
        return generation

    async def start_all(self, requests: Sequence[PreparedRequest]) -> list[Generation]:
        """Start several prompts, all or none; as `start`.

        Raises:
            RequestError: they are more than could ever wait at once.
        """
        self._check_number(sum(request.params.n for request in requests))
        starts = [asyncio.ensure_future(self.start(request)) for request in requests]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:  # our caller being cancelled is one
            for start in starts:
                start.cancel()
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, Generation):
                    outcome.abort()
            raise

    def abort(self, request_id: str) -> None:
        """End a request by the client's id; an unknown one is ignored."""
        item = self._in_flight.by_request_id(request_id)
        if item is not None:
            item.generation.abort()

    def abort_all(self) -> None:
        """End every request."""
        for item in self._in_flight:
            item.generation.abort()

    async def flush_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns the tokens forgotten in all replicas."""
        return int(sum(await self.calls.call_schedulers("flush_cache")))

    async def pause(self, mode: str) -> None:
        """Stop generating until `resume`; requests that come meanwhile wait.

        Args:
            mode: "abort" ends what is under way, "in_place" keeps it as it stands, "retract" also gives its memory up.
        """
        self.replicas.pause()
        if mode == "abort":
            self.abort_all()
        await self.calls.call_those_that_stay("pause", retract=mode == "retract")

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.calls.call_those_that_stay("resume")
        self.replicas.resume()

    async def update_weights(
        self, path: str | None, tensors: bytes | None, *, flush_cache: bool, abort_all: bool, version: str | None
    ) -> int:
        """Replace the model's weights in every replica. Requests under way end first; new ones wait for it.

        While generation is paused nothing is waited for: what is under way is computed again after `resume`, or goes on
        with its keys and values if `flush_cache` is False.

        Args:
            path: of a checkpoint; None for tensors.
            tensors: the content of a safetensors file; None for a checkpoint.
            abort_all: end requests under way instead of waiting for them.
            version: what answers call these weights; None leaves the name.

        Returns: prompts that were paused meanwhile.

        Raises:
            RequestError: the weights do not fit; every replica has those it had.
            UnavailableError: no replica is up; or some have the new weights and some could not take them, which serve
                nothing until an update succeeds.
        """
        arguments = {"path": path, "tensors": tensors, "flush_cache": flush_cache}
        async with self._updating:
            self.replicas.hold()
            try:
                if abort_all:
                    self.abort_all()
                if abort_all or not self.health.paused:
                    await self._idle.wait()
                num_paused = len(self._in_flight)
                processes = [replica.name for replica in self.replicas.up]
                outcomes = await self.calls.call_each(processes, "update_weights", arguments, UPDATE_TIMEOUT_S)
                self._check_updates(outcomes, version)
            finally:
                self.replicas.release()
        return num_paused

    def _check_updates(self, outcomes: Mapping[str, object], version: str | None) -> None:
        """Note which replicas have new weights, and their version; raises as `update_weights`."""
        if not outcomes:
            raise UnavailableError(self.replicas.why_unavailable)
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        if len(failed) == len(outcomes):
            raise next(iter(failed.values()))
        self._weights_changed = True
        self.weight_version = version or self.weight_version
        for replica in self.replicas.up:
            if replica.name in outcomes and replica.name not in failed:
                self.replicas.renew(replica.name)
            else:  # it failed, or started again after the update had begun
                self.replicas.outdate(replica.name)
        if failed:
            reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise UnavailableError(
                f"{len(outcomes) - len(failed)} of {len(outcomes)} replicas have the new weights; these have not, and "
                f"serve nothing until an update succeeds: {reasons}"
            )

    async def in_thread(self, function: Callable[[], T], *, has_grammar: bool = False) -> T:
        """Run what takes a while beside the event loop; grammars, which may take seconds, in threads of their own."""
        if has_grammar:
            return await self._grammar_threads.run(function)
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def is_token(self, text: str) -> bool:
        """Whether the vocabulary has a token that is all of a text, and not a special one, which is none."""
        return self._encoder.is_token(text)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n]."""
        return await self.in_thread(lambda: self._encoder.encode_text(text, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Message], **template_args: Any) -> TokenIds:
        """Return a chat's token ids, int32 [n]."""
        return await self.in_thread(lambda: self._encoder.encode_chat(messages, template_args))

    async def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, int32 [n].

        Raises:
            InvalidPromptError: an id is outside the vocabulary.
        """
        return await self.in_thread(lambda: self._encoder.decode(token_ids, skip_special_tokens))

    # -- for the server's life -----------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until none is under way."""
        self.replicas.drain()
        await self._idle.wait()

    def close(self) -> None:
        """Fail what is under way and end the threads."""
        self.replicas.drain()
        self._fail([*self._in_flight], "the server is stopping")
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- for the launcher ----------------------------------------------------------------------------------------------

    def process_ready(self, name: str) -> None:
        """Note that a process takes messages."""
        if self.replicas.named(name) is not None:
            self.adapters.restarted(name)
        self.replicas.started(name)
        if self._weights_changed:
            self.replicas.outdate(name)  # a replica that starts has those of the configuration

    def process_stuck(self, name: str, seconds: float) -> None:
        """Note that a process has not answered for a while."""
        self.replicas.stuck(name, seconds)

    def process_moves(self, name: str) -> None:
        """Note that a process that was stuck answers again."""
        self.replicas.moves(name)

    def give_up(self) -> None:
        """Have requests fail that wait for a process: nothing will be started again."""
        self.replicas.give_up()

    def process_died(self, name: str, reason: str) -> None:
        """Fail what a dead process held: a scheduler its own requests, the detokenizer all."""
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
        """Take in what a process says."""
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
                    replica.load = message
            case Reply():
                self.calls.answer(message)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_id(self, request_id: str | None) -> None:
        if request_id is not None and request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is in use; give every request its own")

    def _check_number(self, num_completions: int) -> None:
        limit = self.config.scheduling.max_queued_requests * self.config.parallel.data
        if num_completions > limit:
            raise RequestError(
                f"one call asks for {num_completions} completions, more than may wait ({limit}). Send them in several "
                "calls, or raise scheduling.max_queued_requests."
            )

    def _apply(self, update: RequestUpdate, text: str, now: float) -> None:
        item = self._in_flight.by_completion_id(update.request_id)
        if item is None:
            return  # it was given up here before the scheduler heard of that
        generation = item.generation
        generation.apply(update, text)
        if update.token_ids:
            if item.heard_s is None:
                self._in_flight.first_heard(item, now)
                self._metrics.first_token(now - item.arrived_s)
            else:
                self._metrics.more_tokens(now - item.heard_s, len(update.token_ids))
                item.heard_s = now
        if generation.finished:
            self._remove(item, generation.outcome)
            if generation.failed:  # what else runs of it is not wanted any more
                self._abort_completions(item, "it failed")

    def _abort(self, generation: Generation) -> None:
        item = self._in_flight.by_request_id(generation.request_id)
        if item is not None and item.generation is generation:
            self._abort_completions(item, "aborted")

    def _abort_completions(self, item: InFlight, reason: str) -> None:
        self._send(item.replica.name, Abort(completion_ids=item.generation.completion_ids, reason=reason))

    def _fail(self, items: Sequence[InFlight], text: str) -> None:
        for item in items:
            self._end(item, UnavailableError(text), "unavailable")  # its own: raising one writes down where
            self._abort_completions(item, "the server gave it up")

    def _end(self, item: InFlight, error: GraftlmError, outcome: str) -> None:
        item.generation.fail(error)
        self._remove(item, outcome)

    def _remove(self, item: InFlight, outcome: str) -> None:
        if self._in_flight.remove(item):
            output = item.generation.gathered()
            self._metrics.finished(output, self._clock() - item.arrived_s, outcome)
            if self._recorder is not None and item.heard_s is not None:
                self._recorder.record(_finished_request(item, output))
        if not len(self._in_flight):
            self._idle.set()


def _finished_request(item: InFlight, output: GatheredOutput) -> FinishedRequest:
    request = item.generation.request
    options = request.options
    return FinishedRequest(
        prompt=request.prompt_token_ids,
        outputs=[completion.token_ids for completion in output.completions],
        arrived_s=item.arrived_s,
        namespace=prefix_namespace(options.cache_salt, options.adapter),
        priority=options.priority,
    )


def _error_named(name: str, message: str) -> GraftlmError:
    """Return the error of a class in `graftlm.errors`."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, GraftlmError) else RequestError(message)
