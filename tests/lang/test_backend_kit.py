"""The conformance kit passes for every backend, and finds the faults of faulty ones."""

from unittest import SkipTest

import pytest
import requests

from graftlm.lang import Anthropic, EngineBackend, Generation, OpenAI, RuntimeEndpoint, Sampling
from graftlm.testing import BackendConformance, run_conformance
from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel

NOBODY = "http://127.0.0.1:9"


class TestEngineBackend(BackendConformance):
    @pytest.fixture(autouse=True)
    def _own(self, engine):
        self.engine = engine

    def create(self):
        return EngineBackend(self.engine)

    def num_requests(self):
        stats = self.engine.stats()
        return stats.running_requests + stats.waiting_requests


class OnServer(BackendConformance):
    @pytest.fixture(autouse=True)
    def _own(self, server):
        self.url = server.url

    def num_requests(self):
        return sum(load["num_reqs"] for load in requests.get(f"{self.url}/get_load", timeout=10).json())


class TestRuntimeEndpoint(OnServer):
    def create(self):
        return RuntimeEndpoint(self.url)

    def create_unreachable(self):
        return RuntimeEndpoint(NOBODY)


class TestOpenAICompletions(OnServer):
    endless = Sampling(max_tokens=1500, temperature=0.0, stop=("\0",))
    prompt = "Count: 1 2 3 4 5 6 7 8 9 10 11 12"

    def create(self):
        return OpenAI("demo", base_url=f"{self.url}/v1", is_chat=False)

    def create_unreachable(self):
        return OpenAI("demo", base_url=NOBODY, is_chat=False)


class TestOpenAIChat(OnServer):
    is_chat = True
    prompt = "What is the capital of France?"
    choices = ("The", "A", "It")

    def create(self):
        return OpenAI("demo", base_url=f"{self.url}/v1", is_chat=True)

    def create_unreachable(self):
        return OpenAI("demo", base_url=NOBODY, is_chat=True)

    def num_requests(self):
        raise SkipTest("the model has nothing endless to say in a chat")


class TestAnthropic(OnServer):
    is_chat = True
    prompt = "What is the capital of France?"

    def create(self):
        return Anthropic("demo", base_url=self.url, api_key="none", max_retries=0)

    def create_unreachable(self):
        return Anthropic("demo", base_url=NOBODY, api_key="none", max_retries=0)

    def num_requests(self):
        raise SkipTest("the model has nothing endless to say in a chat")


# -- Faulty backends


class StreamsPieces(OpenAI):
    async def stream(self, request):
        async for generation in super().stream(request):
            yield Generation(generation.text[-2:], generation.meta_info)


class KeepsTheStop(OpenAI):
    async def generate(self, request):
        generations = await super().generate(request)
        stop = (request.sampling.stop or ("",))[0]
        return [Generation(g.text + stop, g.meta_info) for g in generations]


class ForgetsOne(OpenAI):
    async def generate(self, request):
        return (await super().generate(request))[:2]


class LosesPatterns(OpenAI):
    async def generate(self, request):
        return await super().generate(type(request)(request.prompt, Sampling(max_tokens=8), request.messages))


class ForgetsAScore(OpenAI):
    async def score(self, prompt, choices, *, unconditional, messages=()):
        return (await super().score(prompt, choices, unconditional=unconditional))[1:]


@pytest.fixture(scope="module")
def scripted():
    def logprob(text, token):
        return -0.1 if token in (" It", " is", " well", " known") else -5.0

    with ScriptedApi(ScriptedModel(lambda prompt: " It is well known.", logprob=logprob)) as api:
        yield api


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (OpenAI, set()),
        (StreamsPieces, {"test_a_stream_grows_to_the_whole_text"}),
        (KeepsTheStop, {"test_a_stop_string_ends_the_text_before_it"}),
        (ForgetsOne, {"test_all_of_n_come"}),
        (LosesPatterns, {"test_a_pattern_is_followed_or_refused"}),
        (ForgetsAScore, {"test_each_choice_is_scored", "test_the_models_own_words_are_the_likeliest"}),
    ],
)
def test_the_kit_finds_the_fault(kind, broken, scripted):
    class Kit(BackendConformance):
        def create(self):
            return kind("scripted", base_url=scripted.url, is_chat=False)

    results = {result.name: result.error for result in run_conformance(Kit)}
    failed = {name for name, error in results.items() if isinstance(error, AssertionError)}
    assert broken <= failed
    assert failed or not broken
    if not broken:
        assert failed <= {"test_a_bad_parameter_is_the_requests_fault"}  # the scripted model accepts any temperature
