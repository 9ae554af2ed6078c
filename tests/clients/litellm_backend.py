"""graftlm's backend LiteLLM: programs of graftlm.lang through LiteLLM, compared with graftlm's own endpoint.

`litellm_client.py` imports these checks. They run in LiteLLM's environment, which lacks most of graftlm's requirements.
"""

import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checks
from checks import WEATHER, check, matches_weather, raises

sys.path.append(str(Path(__file__).parent.parent.parent / "core"))

from graftlm.errors import (
    ConfigError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang import (
    LiteLLM,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)

#: Provider -> URL of the server for it.
PROVIDERS = {"hosted_vllm": f"{checks.URL}/v1", "openai": f"{checks.URL}/v1", "anthropic": checks.URL}
CHATS = ("hosted_vllm", "openai")
NAMES = ("answer", "day")


def backend(provider, **options):
    options = {"base_url": PROVIDERS[provider], "api_key": checks.KEY, "max_retries": 0} | options
    return LiteLLM(f"{provider}/demo", **options)


@function
def talk(s, question, start=""):
    s += system("Answer in one sentence.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=24))
    s += user("Which day comes after Thursday?")
    s += assistant(start + gen("day", max_tokens=12, temperature=0))


@function
def ask(s, expr):
    s += user(checks.QUESTION)
    s += assistant(expr)


@function
def plain(s):
    s += checks.QUESTION
    s += gen("x", max_tokens=24)


def raised(expected, call):
    """Return the cause of the ProgramError that the call raises; it must be of this class."""
    cause = raises(Exception, call).__cause__
    assert type(cause) is expected, repr(cause)
    return str(cause)


def own():
    return RuntimeEndpoint(checks.URL, checks.KEY)


@check
def chats_of_programs():
    """graftlm.LiteLLM: chats of several turns have the engine's text, whole, streamed and in batches"""
    questions = [{"question": f"What is {i} plus 3?"} for i in range(8)]
    expected = talk.run_batch(questions, backend=own(), temperature=0)
    for provider in PROVIDERS:
        with backend(provider) as it:
            for stream in (False, True):
                state = talk.run(**questions[0], backend=it, temperature=0, stream=stream)
                assert [state[name] for name in NAMES] == [expected[0][name] for name in NAMES], (provider, stream)
                if stream:
                    assert "".join(state.text_iter("day")) == expected[0]["day"]
            states = talk.run_batch(questions, backend=it, temperature=0, num_threads=4)
            assert [s.messages() for s in states] == [s.messages() for s in expected], provider
            assert plain.run(backend=it, temperature=0)["x"] == ask.run(gen("x"), backend=own(), temperature=0)["x"]


@check
def continued_messages():
    """graftlm.LiteLLM: a partial message is continued as the engine continues it"""
    expected = talk.run(checks.QUESTION, "The day", backend=own(), temperature=0)
    for provider in PROVIDERS:
        options = {} if provider == "anthropic" else {"continue_final_message": True}
        for stream in (False, True):
            state = talk.run(checks.QUESTION, "The day", backend=backend(provider, **options), stream=stream)
            assert state["day"] == expected["day"], (provider, stream)
    whole = ask.run("2 + 3" + gen("x"), backend=backend("openai"), temperature=0)
    assert whole["x"] == " = 5."


@check
def parameters():
    """graftlm.LiteLLM: stop strings, top_k, n, penalties, a JSON schema, select, token counts"""
    for provider in PROVIDERS:
        with backend(provider) as it:
            state = ask.run(gen("x", stop=["="], top_k=1, top_p=0.5, temperature=0), backend=it)
            meta = state.get_meta_info("x")
            assert (state["x"].rstrip(), meta["finish_reason"]["type"]) == ("2 + 3", "stop"), (provider, state["x"])
            usage = it.token_usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (meta["prompt_tokens"], meta["completion_tokens"])
            state = ask.run(gen("x", max_tokens=3), backend=it, stream=True)
            assert state.get_meta_info("x")["finish_reason"] == {"type": "length", "length": 3}
    for provider in CHATS:
        with backend(provider) as it:
            assert ask.run(gen("x", n=2, presence_penalty=0.1), backend=it, temperature=0)["x"] == [checks.ANSWER] * 2
            weather = ask.run(gen("x", json_schema=json.dumps(WEATHER)), backend=it)["x"]
            assert matches_weather(json.loads(weather))
            assert ask.run(select("x", ["Five", "2 + 3", "Six"]), backend=it)["x"] == "2 + 3"


@check
def errors_of_programs():
    """graftlm.LiteLLM: errors are graftlm's classes"""
    long = gen("x")
    for provider in PROVIDERS:
        it = backend(provider)
        raised(UnsupportedFeatureError, lambda it=it: ask.run(gen("x", regex="a"), backend=it)["x"])
        raised(RequestError, lambda it=it: ask.run(gen("x", temperature=-1.0), backend=it)["x"])
        raised(PromptTooLongError, lambda it=it: talk.run("one two " * 5000, backend=it)["day"])
        raised(RequestError, lambda p=provider: ask.run(long, backend=backend(p, api_key="wrong"))["x"])
        nobody = backend(provider, base_url="http://127.0.0.1:9")
        raised(UnavailableError, lambda it=nobody: ask.run(long, backend=it)["x"])
        hurried = backend(provider, timeout=0.001)
        raised(RequestTimeoutError, lambda it=hurried: ask.run(long, backend=it)["x"])
    raised(UnsupportedFeatureError, lambda: ask.run(gen("x", n=2), backend=backend("anthropic"))["x"])
    raised(UnsupportedFeatureError, lambda: ask.run(select("x", ["a", "b"]), backend=backend("anthropic"))["x"])
    raises(ConfigError, LiteLLM, "no-such-provider/demo")


def num_aborted():
    """Return the number of requests that the server has aborted."""
    request = urllib.request.Request(f"{checks.URL}/metrics", headers={"Authorization": f"Bearer {checks.KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = re.search(r'requests_finished_total\{reason="abort"\} ([\d.]+)', answer.read().decode())
    return float(found[1]) if found else 0.0


def wait_until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@check
def cancelled():
    """graftlm.LiteLLM: cancelling a run aborts its request on the server"""
    for provider in CHATS:
        it = backend(provider, extra_body={"ignore_eos": True})
        before = num_aborted()
        state = ask.run(gen("x", max_tokens=1900), backend=it, stream=True)
        assert next(state.text_iter("x"))
        state.cancel()
        wait_until(lambda before=before: num_aborted() == before + 1)


@check
def threads():
    """graftlm.LiteLLM: programs in several threads share one backend"""
    with backend("openai") as it, ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: ask.run(gen("x"), backend=it, temperature=0)["x"], range(16))
        assert set(answers) == {checks.ANSWER}
