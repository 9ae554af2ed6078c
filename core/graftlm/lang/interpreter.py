"""Runs the expressions of one program state, in order, in the shared event loop."""

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from graftlm.errors import (
    GraftlmError,
    InvalidPromptError,
    ProgramCancelledError,
    ProgramError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnsupportedFeatureError,
)
from graftlm.lang.backend import Backend, Generation, GenerationRequest, PictureBackend, SpeculatingBackend
from graftlm.lang.call_site import CallSite, error_at
from graftlm.lang.expressions import Gen, Image, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text, Written
from graftlm.lang.reasoning import ReasoningFilter
from graftlm.lang.sampling import Sampling
from graftlm.lang.steps import Action, End, Later, Snapshot, Step, Take, TakeWritten
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.variables import Cell, Value, arrival

__all__ = ["Interpreter", "RunContext"]

logger = logging.getLogger(__name__)

#: Before a fork, the backend caches the text if at least this number of characters is new. Caching takes one more step,
#: and all forks wait for this step. For a shorter text, this takes longer than computing the text in each fork.
_MIN_HINT_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class RunContext:
    """Settings that all states of one run share.

    Attributes:
        defaults: values of sampling parameters that a `gen` does not set.
        streams: whether variables grow token by token.
        num_api_spec_tokens: see `@function`; None: one request for each `gen`.
    """

    backend: Backend
    defaults: Sampling
    streams: bool
    loop: asyncio.AbstractEventLoop
    num_api_spec_tokens: int | None = None

    def backend_of_state(self) -> Backend:
        """Return the backend for one state: the run's backend, or a speculative view of it for this state."""
        if self.num_api_spec_tokens is None or not isinstance(self.backend, SpeculatingBackend):
            return self.backend
        return self.backend.speculative(self.num_api_spec_tokens)


@dataclass(slots=True)
class _Scope:
    cell: Cell
    start: int


class Interpreter:
    """A queue of expressions and the text that they produce.

    `submit` may be called from any thread; all other work happens in the run's event loop. A task exists only while
    there are expressions to run. It waits in the backend's coroutines. The first error ends the queue: expressions that
    are waiting, or are submitted later, fail with the same error.
    """

    def __init__(self, context: RunContext, origin: "Future[Snapshot] | None" = None) -> None:
        """Begin with an empty state, or with `origin`, a snapshot of another state, when it is available."""
        self.feed = TextFeed()
        self._context = context
        self._backend = context.backend_of_state()
        self._origin = origin
        self._steps: deque[Step] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False
        # Only the event loop writes the fields below.
        self._task: asyncio.Task[None] | None = None
        self._is_running = False
        self._has_ended = False
        self._error: ProgramError | None = None
        self._messages: list[dict[str, str]] = []
        self._images: list[bytes] = []
        self._role: str | None = None
        self._scopes: dict[str, list[_Scope]] = {}
        self._cached_len = 0
        self._began_as = Snapshot()
        self._children: weakref.WeakSet[Interpreter] = weakref.WeakSet()

    @property
    def error(self) -> ProgramError | None:
        """The error that ended the queue, if any."""
        return self._error

    @property
    def context(self) -> RunContext:
        """The settings of the run."""
        return self._context

    def submit(self, action: Action, site: CallSite | None = None, cell: Cell | None = None) -> None:
        """Queue an expression; its value or its error is stored in `cell`."""
        with self._lock:
            self._steps.append(Step(action, site, cell))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._context.loop.call_soon_threadsafe(self._start)

    def fork(self, number: int, site: CallSite, *, is_hint: bool = True) -> "list[Interpreter]":
        """Return interpreters that continue from the state after all expressions that are queued now.

        Args:
            is_hint: whether the backend should cache the text before several forks begin; without effect for one fork.
        """
        taken: Future[Snapshot] = Future()
        children = [Interpreter(self._context, taken) for _ in range(number)]
        with self._lock:  # the event loop iterates over the set when it fails the states
            self._children.update(children)
        self.submit(Take(taken, shared=is_hint and number > 1), site)
        return children

    def fail(self, error: ProgramError) -> None:
        """End this queue and its forks' queues with an error; cancel their requests. Safe in a finalizer."""
        self._context.loop.call_soon_threadsafe(self._fail_now, error)

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._is_running = True
        while (step := self._next_step()) is not None:
            try:
                if self._error is None:  # a state that was cancelled before it began does not wait for its origin
                    await self._begin()
                    await self._execute(step)
            except BaseException as error:  # includes cancellation: later expressions must fail with this error
                self._fail_with(_program_error(error, step.site))
            if self._error is not None:
                step.fail(self._error)
        self._is_running = False

    def _next_step(self) -> Step | None:
        with self._lock:
            if self._steps:
                return self._steps.popleft()
            self._is_scheduled = False
            return None

    async def _begin(self) -> None:
        """Copy the snapshot with which this state begins, once."""
        if self._origin is None:
            return
        origin, self._origin = self._origin, None
        self._become(await arrival(origin))

    def _become(self, snapshot: Snapshot) -> None:
        self._began_as = snapshot
        self._messages = [dict(message) for message in snapshot.messages]
        self._role, self._cached_len = snapshot.role, snapshot.cached_len
        self._images = list(snapshot.images)
        self.feed.append(snapshot.text)

    def _fail_now(self, error: ProgramError) -> None:
        waiting = [self]
        while waiting:  # a list instead of recursion: forks of forks can be deeper than Python's stack
            interpreter = waiting.pop()
            interpreter._cancel_with(error)
            waiting += interpreter._living_children()

    def _living_children(self) -> "list[Interpreter]":
        with self._lock:
            return list(self._children)

    def _cancel_with(self, error: ProgramError) -> None:
        if self._has_ended and not self._is_running:  # its forks may still run; the caller cancels them
            return
        self._fail_with(error)
        if self._task is not None and self._is_running:  # the task is waiting for its backend
            self._task.cancel()  # a task that has not begun will see the error

    def _fail_with(self, error: ProgramError) -> None:
        self._error = self._error or error
        self._fail_scopes(self._error)
        self.feed.end(self._error)

    def _fail_scopes(self, error: ProgramError) -> None:
        for cell in (scope.cell for scopes in self._scopes.values() for scope in scopes):
            cell.fail(error)
        self._scopes.clear()

    async def _execute(self, step: Step) -> None:
        match step.action:
            case Text(text):
                self._append(text)
            case Image(source):
                await self._append_image(source)
            case Written() as written:
                self._append_written(written)
            case Gen() as gen:
                await self._generate(gen, step.cell or Cell())
            case Select() as select:
                await self._select(select, step.cell or Cell())
            case RoleBegin(role):
                await self._open_message(role)
            case RoleEnd(role):
                await self._close_message(role)
            case ScopeBegin(name):
                self._scopes.setdefault(name, []).append(_Scope(step.cell or Cell(), len(self.feed.text)))
            case ScopeEnd(name):
                self._close_scope(name)
            case Snapshot() as snapshot:
                self._become(snapshot)
            case Later(expr):
                await self._execute(Step(await expr(), step.site, step.cell))
            case Take(taken, shared):
                await self._take(taken, shared)
            case TakeWritten(written_by):
                written_by.set_result(self._snapshot().since(self._began_as))
            case End(ended):
                self._has_ended = True
                self._fail_scopes(ProgramError("the program ended with a var_scope open"))
                self.feed.end()
                ended.set_result(None)

    def _append(self, text: str) -> None:
        if self._role is not None:
            self._messages[-1]["content"] += text
        self.feed.append(text)

    async def _append_image(self, source: str | bytes | os.PathLike[str]) -> None:
        """Append the backend's marker of a picture, and store the picture.

        Raises:
            UnsupportedFeatureError: the backend or its model does not take pictures.
            RequestError: the file cannot be read.
        """
        if not isinstance(self._backend, PictureBackend):
            raise UnsupportedFeatureError(f"image: {type(self._backend).__name__} does not take pictures")
        self._images.append(source if isinstance(source, bytes) else await asyncio.to_thread(_read_image, source))
        self._append(await self._backend.image_marker())

    def _append_written(self, written: Written) -> None:
        if self._role is not None and written.messages:
            raise RequestError(f"a message of {self._role} is open; end it before a fork's messages are appended")
        self._append(written.text)
        self._messages += [dict(message) for message in written.messages]
        self._images += written.images

    async def _generate(self, gen: Gen, cell: Cell) -> None:
        sampling = gen.sampling.over(self._context.defaults).resolved()
        request = GenerationRequest(self._prompt(), sampling, self._open_chat(), tuple(self._images))
        if self._context.streams and (sampling.n or 1) == 1:
            value = await self._stream(request, gen, cell)
        else:
            value = await self._generate_whole(request, gen)
        self._cached_len = len(self.feed.text)
        cell.fill(value)
        if cell.reasoning is not None:
            cell.reasoning.fill(_reasoning_of(value))

    def _prompt(self) -> str:
        """Return the text so far.

        Raises:
            InvalidPromptError: the text is empty.
        """
        if not self.feed.text:
            raise InvalidPromptError("the program's text is empty; append text before gen or select")
        return self.feed.text

    def _open_chat(self) -> tuple[dict[str, str], ...]:
        """Return the chat's messages if its last one is open, else ()."""
        return () if self._role is None else tuple([dict(message) for message in self._messages])

    async def _generate_whole(self, request: GenerationRequest, gen: Gen) -> Value:
        generations = await (self._generate_split(request) if gen.may_split else self._backend.generate(request))
        if gen.reasoning is not None:
            generations = [ReasoningFilter(gen.reasoning, request.prompt).apply(g) for g in generations]
        self._append(generations[0].text)
        if (request.sampling.n or 1) == 1:
            return Value(generations[0].text, generations[0].meta_info)
        return Value([g.text for g in generations], [g.meta_info for g in generations])

    async def _generate_split(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt `n` times with one request; if the backend refuses it, with `n` requests."""
        try:
            return await self._backend.generate(request)
        except (RequestFailedError, RequestTimeoutError):  # the backend accepted the request, which failed later
            raise
        except RequestError as error:
            logger.debug("n=%s was refused; one request per completion: %s", request.sampling.n, error)
        one = replace(request, sampling=replace(request.sampling, n=None))
        try:
            async with asyncio.TaskGroup() as group:  # not `self._backend`: a speculative view handles one text
                asked = [group.create_task(self._context.backend.generate(one)) for _ in range(request.sampling.n or 1)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [generation for task in asked for generation in task.result()]

    async def _stream(self, request: GenerationRequest, gen: Gen, cell: Cell) -> Value:
        value = Value("")
        reasoning = None if gen.reasoning is None else ReasoningFilter(gen.reasoning, request.prompt)
        async with aclosing(self._backend.stream(request)) as generations:
            async for generation in generations:
                if reasoning is not None:
                    generation = reasoning.apply(generation)
                if cell.reasoning is not None:
                    cell.reasoning.feed.grow(str(_reasoning_of(Value("", generation.meta_info)).value))
                new = generation.text[len(value.value) :]
                self._append(new)
                cell.feed.append(new, generation.meta_info)
                value = Value(generation.text, generation.meta_info)
        return value

    async def _select(self, select: Select, cell: Cell) -> None:
        method = select.method
        if self._images:
            raise UnsupportedFeatureError("select is not supported after a picture; use gen(regex=...)")
        scores = await self._backend.score(
            self._prompt(), select.choices, unconditional=method.unconditional, messages=self._open_chat()
        )
        self._cached_len = len(self.feed.text)
        selection = method.select(select.choices, scores)
        choice = select.choices[selection.index]
        self._append(choice)
        cell.fill(Value(choice, selection.meta_info))

    async def _open_message(self, role: str) -> None:
        if self._role is not None:
            raise RequestError(f"a message of {self._role} is open; end it before a message of {role} begins")
        template = await self._backend.chat_template()
        opening = template.opening([*self._roles(), role])
        self.feed.append(opening)
        self._messages.append({"role": role, "content": ""})
        self._role = role

    async def _close_message(self, role: str) -> None:
        if self._role != role:
            raise RequestError(f"a message of {role} ends, but the role of the open message is {self._role or 'none'}")
        template = await self._backend.chat_template()
        self.feed.append(template.closing(self._roles()))
        self._role = None

    def _roles(self) -> list[str]:
        return [message["role"] for message in self._messages]

    def _close_scope(self, name: str) -> None:
        scopes = self._scopes.get(name)
        if not scopes:
            raise RequestError(f"the scope {name!r} ends, but no scope of this name is open")
        scope = scopes.pop()
        scope.cell.fill(Value(self.feed.text[scope.start :]))

    async def _take(self, taken: "Future[Snapshot]", shared: bool) -> None:
        text = self.feed.text
        if shared and not self._images and len(text) - self._cached_len >= _MIN_HINT_CHARACTERS:
            await self._hint(text)
        taken.set_result(self._snapshot())

    def _snapshot(self) -> Snapshot:
        messages = tuple([dict(message) for message in self._messages])
        return Snapshot(self.feed.text, messages, self._role, self._cached_len, tuple(self._images))

    async def _hint(self, text: str) -> None:
        """Let the backend cache the text. A refusal is not an error: the next request will report the cause."""
        try:
            await self._backend.cache_prefix(text)
        except GraftlmError as error:
            logger.debug("a prefix of %d characters was not cached before a fork: %s", len(text), error)
        self._cached_len = len(text)  # also after a refusal: the next fork's hint would be refused too


def _read_image(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"image: cannot read {str(path)!r}: {error.strerror or error}") from error


def _reasoning_of(value: Value) -> Value:
    """Return the reasoning before a value; a list if `n` texts were generated."""
    if isinstance(value.meta_info, list):
        return Value([meta.get("reasoning_content", "") for meta in value.meta_info])
    return Value(value.meta_info.get("reasoning_content", ""))


def _program_error(error: BaseException, site: CallSite | None) -> ProgramError:
    """Return the error that reads will raise, with the program's line."""
    if isinstance(error, ProgramError):
        return error  # the error of the state that this state continues
    if isinstance(error, asyncio.CancelledError):
        return ProgramCancelledError("this program's run was cancelled")
    what = str(error) if isinstance(error, GraftlmError) else f"{type(error).__name__}: {error}"
    made = error_at(ProgramError, what, site)
    made.__cause__ = error
    return made
