"""The conformance kit for backends of `graftlm.lang`."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, TypeVar
from unittest import SkipTest

from graftlm.errors import EngineError, RequestError, UnsupportedFeatureError
from graftlm.lang import Backend, ChoiceScore, Generation, GenerationRequest, Sampling, greedy_token_selection
from graftlm.lang.event_loop import shared_loop
from graftlm.testing.conformance import Conformance
from graftlm.testing.server_process import wait_until

__all__ = ["BackendConformance"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_TIMEOUT_S: Final = 60.0
_MANY: Final = 24


class BackendConformance(Conformance, ABC):
    """The kit for the contract `graftlm.lang.Backend`, at temperature 0.

        class TestMyBackend(BackendConformance):
            def create(self):
                return MyBackend("http://127.0.0.1:9000")

    A test is skipped if the backend raises `UnsupportedFeatureError`.

    Attributes:
        prompt: a prompt; the model's answer must have at least four characters.
        choices: texts that may follow the prompt; they must start with different tokens.
        is_chat: whether the backend only answers chats; `prompt` is then a user's message.
        endless: sampling parameters of a request that runs long enough to be cancelled.
    """

    prompt: ClassVar[str] = "The capital of France is"
    choices: ClassVar[Sequence[str]] = (" Paris", " a city in the north", " no")
    is_chat: ClassVar[bool] = False
    endless: ClassVar[Sampling] = Sampling(max_tokens=1500, ignore_eos=True, temperature=0.0)

    @abstractmethod
    def create(self) -> Backend:
        """Return a new backend that works."""

    def create_unreachable(self) -> Backend:
        """Return a backend whose server cannot be reached. Override this method for a backend that uses a server."""
        raise SkipTest("the backend uses no server, or the kit has no create_unreachable()")

    def num_requests(self) -> int:
        """Return the number of unfinished requests in the engine or server, if a subclass can count them."""
        raise SkipTest("the engine or server does not count its requests, or the kit has no num_requests()")

    def test_it_is_a_backend(self) -> None:
        """A backend has the six methods of the protocol."""
        assert isinstance(self.create(), Backend), "a method is missing"

    def test_completions_come_with_their_counts(self) -> None:
        """`meta_info` contains id, finish_reason, prompt_tokens, completion_tokens and cached_tokens."""
        (generation,) = self._generate(max_tokens=3)
        meta = generation.meta_info
        missing = {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"} - meta.keys()
        assert not missing, f"meta_info lacks {sorted(missing)}"
        assert meta["prompt_tokens"] > 0, meta
        assert 0 < meta["completion_tokens"] <= 3, f"max_tokens is 3, and meta_info says {meta}"
        assert meta["finish_reason"]["type"] in ("length", "stop"), meta

    def test_temperature_0_repeats_itself(self) -> None:
        """Equal requests at temperature 0 get equal answers, also when more requests run than fit at one time."""

        async def many(backend: Backend) -> list[list[Generation]]:
            request = await self._request(backend, max_tokens=4)
            return await asyncio.gather(*[backend.generate(request) for _ in range(_MANY)])

        texts = {generations[0].text for generations in self._run(many)}
        assert len(texts) == 1, f"temperature 0 gives {texts}"

    def test_all_of_n_come(self) -> None:
        """`generate` returns all `n` completions."""
        alone, *rest = [g.text for g in self._generate(max_tokens=4, n=3)]
        assert rest == [alone] * 2, f"expected 3 equal completions at temperature 0, got {[alone, *rest]}"

    def test_a_stop_string_ends_the_text_before_it(self) -> None:
        """A stop string ends a completion and is not part of it."""
        whole = self._text()
        stop = whole[len(whole) // 2 :][:2]
        (generation,) = self._generate(max_tokens=16, stop=(stop,))
        expected = whole[: whole.index(stop)]
        assert generation.text == expected, f"{whole!r} with stop {stop!r} gives {generation.text!r}"
        assert generation.meta_info["finish_reason"]["type"] == "stop", generation.meta_info

    def test_a_stream_grows_to_the_whole_text(self) -> None:
        """`stream` yields completions of growing text; the last one has the whole text and a finish_reason."""

        async def all_of(backend: Backend) -> list[Generation]:
            async with aclosing(backend.stream(await self._request(backend, max_tokens=16))) as generations:
                return [generation async for generation in generations]

        generations = self._run(all_of)
        texts = [generation.text for generation in generations]
        for before, after in pairwise(texts):
            assert after.startswith(before), f"{before!r} is followed by {after!r}"
        assert texts[-1] == self._text(), f"the stream ends with {texts[-1]!r}"
        assert generations[-1].meta_info["finish_reason"] is not None, "the last completion has no finish_reason"

    def test_a_pattern_is_followed_or_refused(self) -> None:
        """A backend enforces a regex or raises `UnsupportedFeatureError`. It does not ignore the regex."""
        (generation,) = self._generate(max_tokens=8, regex="[0-9]{3}")
        text = generation.text
        assert len(text) == 3, f"the regex [0-9]{{3}} gives {text!r}"
        assert text.isdigit(), f"the regex [0-9]{{3}} gives {text!r}"

    def test_a_bad_parameter_is_the_requests_fault(self) -> None:
        """The backend raises `RequestError` for a request with an invalid parameter."""
        try:
            self._run_raising(lambda backend: self._generations(backend, temperature=-1.0, max_tokens=2))
        except RequestError:
            return
        raise AssertionError("temperature -1 was accepted")

    def test_each_choice_is_scored(self) -> None:
        """`score` returns a log-probability for each token of each choice."""
        scores = self._scores(self.choices, unconditional=False)
        assert len(scores) == len(self.choices), f"{len(self.choices)} choices have {len(scores)} scores"
        for choice, score in zip(self.choices, scores, strict=True):
            assert len(score.token_ids) == len(score.logprobs) > 0, f"{choice!r} has {score}"
            assert all(logprob <= 1e-4 for logprob in score.logprobs), f"{choice!r} has {score.logprobs}"

    def test_the_models_own_words_are_the_likeliest(self) -> None:
        """The scores of a choice depend on the prompt: the model's own answer at temperature 0 has the best score."""
        choices = ["@#", self._text(max_tokens=3), "}{"]
        decision = greedy_token_selection.decide(self._scores(choices, unconditional=False))
        assert decision.index == 1, (
            f"{choices} have the scores {decision.scores}; the second one is the model's own text and must be the best"
        )

    def test_choices_are_scored_alone_when_asked(self) -> None:
        """With `unconditional`, `score` also returns log-probabilities of each choice's tokens without the prompt."""
        for score in self._scores(self.choices, unconditional=True):
            assert len(score.unconditional_logprobs or ()) == len(score.logprobs), score

    def test_caching_a_prefix_changes_no_text(self) -> None:
        """`cache_prefix` does not change the text of later completions."""

        async def cached(backend: Backend) -> str:
            await backend.cache_prefix((await self._request(backend)).prompt)
            return (await self._generations(backend, max_tokens=16))[0].text

        assert self._run(cached) == self._text()

    def test_flushing_changes_no_text(self) -> None:
        """`flush_cache` does not change the text of later completions."""

        async def flushed(backend: Backend) -> str:
            await backend.flush_cache()
            return (await self._generations(backend, max_tokens=16))[0].text

        assert self._run(flushed) == self._text()

    def test_chats_have_a_beginning_for_each_role(self) -> None:
        """`chat_template` returns a template with an opening text for an assistant's message."""

        async def opening(backend: Backend) -> str:
            return (await backend.chat_template()).opening(["user", "assistant"])

        assert self._run(opening), "the template has no opening text for an assistant's message"

    def test_cancelling_frees_the_request(self) -> None:
        """Cancelling a coroutine also cancels its request in the engine or server."""
        self._wait_for_requests(0)
        backend = self.create()
        running = asyncio.run_coroutine_threadsafe(self._endless(backend), shared_loop())
        wait_until(lambda: self.num_requests() > 0, _TIMEOUT_S, "a request")
        running.cancel()
        self._wait_for_requests(0)

    def test_leaving_a_stream_frees_the_request(self) -> None:
        """Closing a stream early also cancels its request in the engine or server."""
        self._wait_for_requests(0)

        async def begin(backend: Backend) -> None:
            request = await self._request(backend)
            endless = GenerationRequest(request.prompt, self.endless, request.messages)
            async with aclosing(backend.stream(endless)) as generations:
                await anext(generations)

        self._run(begin)
        self._wait_for_requests(0)

    def test_a_server_that_is_not_there_is_the_backends_fault(self) -> None:
        """The backend raises `EngineError` if it cannot reach its server."""
        backend = self.create_unreachable()
        self._check_unreachable(self._generations(backend, max_tokens=2))
        try:
            self._check_unreachable(self._score(backend, [" a"]))
        except UnsupportedFeatureError:  # the backend scores no choices
            return

    # -- helpers of the tests ------------------------------------------------------------------------------------------

    def _check_unreachable(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(call, shared_loop()).result(_TIMEOUT_S)
        except EngineError:
            return
        raise AssertionError("the backend answered, but its server does not exist")

    def _run(self, use: "_Use[T]") -> T:
        """Call `use` with a new backend and return the result. Skip the test if the backend lacks a feature."""
        try:
            return self._run_raising(use)
        except UnsupportedFeatureError as error:
            raise SkipTest(str(error)) from None

    def _run_raising(self, use: "_Use[T]") -> T:
        return asyncio.run_coroutine_threadsafe(use(self.create()), shared_loop()).result(_TIMEOUT_S)

    def _generate(self, **sampling: Any) -> list[Generation]:
        return self._run(lambda backend: self._generations(backend, **sampling))

    def _text(self, max_tokens: int = 16) -> str:
        text = self._generate(max_tokens=max_tokens)[0].text
        if len(text) < 4:
            raise SkipTest(f"the model answers only {text!r} to {self.prompt!r}")
        return text

    def _scores(self, choices: Sequence[str], *, unconditional: bool) -> list[ChoiceScore]:
        return self._run(lambda backend: self._score(backend, choices, unconditional=unconditional))

    async def _score(
        self, backend: Backend, choices: Sequence[str], *, unconditional: bool = False
    ) -> list[ChoiceScore]:
        request = await self._request(backend)
        return await backend.score(request.prompt, choices, unconditional=unconditional, messages=request.messages)

    async def _generations(self, backend: Backend, **sampling: Any) -> list[Generation]:
        return await backend.generate(await self._request(backend, **sampling))

    async def _endless(self, backend: Backend) -> list[Generation]:
        request = await self._request(backend)
        return await backend.generate(GenerationRequest(request.prompt, self.endless, request.messages))

    async def _request(self, backend: Backend, **sampling: Any) -> GenerationRequest:
        made = Sampling(**({"temperature": 0.0} | sampling))
        if not self.is_chat:
            return GenerationRequest(self.prompt, made)
        messages = ({"role": "user", "content": self.prompt}, {"role": "assistant", "content": ""})
        return GenerationRequest((await backend.chat_template()).text_of(messages), made, messages)

    def _wait_for_requests(self, number: int) -> None:
        wait_until(lambda: self.num_requests() == number, _TIMEOUT_S, f"{number} requests")


class _Use(Protocol[T_co]):
    """An asynchronous function that uses a backend."""

    def __call__(self, backend: Backend) -> Coroutine[Any, Any, T_co]:
        """Use the backend and return a result."""
