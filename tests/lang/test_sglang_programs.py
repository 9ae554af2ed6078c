"""Programs that are written for SGLang's language: they only change the import."""

import json
import os

import pytest

import graftlm
import graftlm.lang as sgl
from graftlm.errors import ConfigError, EngineError, ProgramError, RequestError, UnsupportedFeatureError
from graftlm.lang import OpenAI, ProgramState, Runtime, RuntimeEndpoint

CAPITAL = "The capital of France is"

#: `sglang.__all__` of SGLang 0.5.23, without Crusoe, a backend for one company's service.
SGLANG_NAMES = [
    "Anthropic",
    "Engine",
    "LiteLLM",
    "OpenAI",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "VertexAI",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


@sgl.function
def qa(s, question, answer_len=4):
    s += question
    s += sgl.gen("answer", max_tokens=answer_len)
    return s["answer"]


@pytest.fixture
def default_backend(backend):
    sgl.set_default_backend(backend)
    yield backend
    sgl.set_default_backend(None)


@pytest.mark.parametrize("name", SGLANG_NAMES)
def test_both_modules_have_sglangs_names(name):
    assert name in graftlm.__all__
    assert name in sgl.__all__
    assert getattr(graftlm, name) is getattr(sgl, name)


def test_both_modules_have_the_same_names_of_the_language():
    assert set(sgl.__all__) <= set(graftlm.__all__)


def test_an_unknown_name_of_the_language_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        sgl.Motor  # noqa: B018


@pytest.mark.parametrize(
    ("name", "use", "replacement"),
    [
        ("ServerArgs", lambda: sgl.ServerArgs(model_path="demo"), "use EngineConfig"),
        ("global_config", lambda: sgl.global_config.default_backend, "use set_default_backend"),
        ("global_config", lambda: setattr(sgl.global_config, "verbosity", 2), "use set_default_backend"),
        ("VertexAI", lambda: sgl.VertexAI("m"), "use LiteLLM"),
    ],
)
def test_sglangs_internals_name_their_replacement_when_they_are_used(name, use, replacement):
    with pytest.raises(UnsupportedFeatureError, match=f"{name} of SGLang is not part of graftlm; {replacement}"):
        use()
    assert replacement in repr(getattr(sgl, name))
    assert not hasattr(getattr(sgl, name), "__wrapped__")  # tools may inspect it


def test_a_call_runs_the_program(default_backend):
    expected = qa.run(CAPITAL, temperature=0).text()
    assert qa(CAPITAL, temperature=0).text() == expected
    assert qa(question=CAPITAL, temperature=0, use_thread=False).text() == expected
    streamed = qa(question=CAPITAL, temperature=0, stream=True)
    assert "".join(streamed.text_iter()) == expected
    assert qa.compile(answer_len=4)(CAPITAL, temperature=0, use_thread=True).text() == expected


def test_a_call_with_a_state_is_a_call_of_the_function(in_process):
    @sgl.function
    def outer(s):
        s += "Question: "
        return qa(s, CAPITAL, answer_len=2)

    state = outer(backend=in_process, temperature=0)
    assert state.ret_value == state["answer"]
    assert state.text() == f"Question: {CAPITAL}{state['answer']}"


def test_use_thread_is_not_an_argument_of_a_program():
    with pytest.raises(RequestError, match="use_thread"):
        sgl.function(lambda s, use_thread: s)


def test_a_program_names_its_function_and_arguments():
    assert qa.func.__name__ == "qa"
    assert qa.func is not qa
    assert qa.arg_names == ["question", "answer_len"]
    assert qa.bind(answer_len=2).arg_names == ["question"]


def test_batches_take_positional_arguments(in_process):
    runs = [[CAPITAL], (CAPITAL, 2), {"question": CAPITAL}]
    states = qa.run_batch(runs, backend=in_process, temperature=0)
    assert [s.get_meta_info("answer")["completion_tokens"] for s in states] == [4, 2, 4]


@pytest.mark.parametrize("entry", [[], [1, 2, 3]])
def test_a_wrong_number_of_positional_arguments_is_refused(entry, in_process):
    with pytest.raises(RequestError, match=r"do not match qa\(\), whose arguments are: question, answer_len"):
        qa.run_batch([entry], backend=in_process)


def test_positional_arguments_do_not_fill_a_starred_one(in_process):
    program = sgl.function(lambda s, *words: s)
    with pytest.raises(RequestError, match="an argument with"):
        program.run_batch([["a", "b"]], backend=in_process)


def test_a_programs_prefix_can_be_cached(backend):
    text = f"Short notes, number {id(backend)} of {os.getpid()}: cats, dogs and owls."

    @sgl.function
    def program(s, question):
        s += text
        s += question + sgl.gen("x", max_tokens=1)

    program.cache(backend)
    assert program.run("Why?", backend=backend).get_meta_info("x")["cached_tokens"] > 10


def test_a_state_as_text_is_its_text(in_process):
    state = qa(CAPITAL, backend=in_process, temperature=0)
    assert str(state) == f"{state}" == state.text()
    assert repr(state) == "<ProgramState with the variables answer>"


def test_numbers_and_strings_take_their_lengths_by_position(in_process):
    @sgl.function
    def program(s):
        s += "1 + 1 = " + sgl.gen_int("i", 2, 2, "9") + sgl.gen_string("s", 3)

    state = program(backend=in_process, temperature=0)
    assert len(state["i"]) == 2
    assert all(meta["completion_tokens"] <= 2 for meta in state.get_meta_info("i"))
    assert state.get_meta_info("s")["completion_tokens"] <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_logprobs_tell_what_would_come_next(stream, backend):
    @sgl.function
    def program(s):
        s += CAPITAL + sgl.gen("next", max_tokens=0, return_logprob=True, top_logprobs_num=3)
        s += sgl.gen("x", max_tokens=1, return_logprob=True)

    state = program(backend=backend, temperature=0, stream=stream)
    meta, (first,) = state.get_meta_info("next"), state.get_meta_info("x")["output_token_logprobs"]
    assert state["next"] == ""
    assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (0, 1)
    assert meta["output_token_logprobs"][0][1] == first[1]
    assert len(meta["output_top_logprobs"][0]) == 3


# Engines trim stop strings and support no lookahead, so the language itself searches for the pattern in these cases.
@pytest.mark.parametrize("other", [{}, {"stop": "zzz"}, {"stop_regex": ["(?=b)zzz", "[a-z]{2}"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_with_the_match_of_a_stop_regex(stream, other, backend):
    @sgl.function
    def program(s):
        s += CAPITAL + sgl.gen("x", max_tokens=40, **({"stop_regex": ["zzz", "[a-z]{2}"]} | other))

    state = program(backend=backend, temperature=0, stream=stream)
    whole = qa(CAPITAL, 40, backend=backend, temperature=0)["answer"]
    assert whole.startswith(state["x"])
    assert len(state["x"]) < len(whole)
    assert state["x"][-2:].islower()
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "[a-z]{2}"}


def test_each_of_several_texts_ends_with_a_match(backend):
    expr = sgl.gen("x", n=3, max_tokens=40, temperature=1.0, stop_regex="[a-z]{2}")
    state = sgl.function(lambda s: s.__iadd__(CAPITAL + expr))(backend=backend)
    assert len(state["x"]) == 3
    for text, meta in zip(state["x"], state.get_meta_info("x"), strict=True):
        assert meta["finish_reason"]["type"] == "length" or text[-2:].isalpha()


def test_a_stop_regex_beside_a_wrong_value_raises_for_that_value(backend):
    state = sgl.function(lambda s: s.__iadd__(CAPITAL + sgl.gen("x", n=2, stop_regex="a", temperature=-1.0)))(
        backend=backend
    )
    with pytest.raises(ProgramError, match="temperature"):
        state["x"]


def last_choice(**given):
    """A choices method in SGLang's form, as a function."""
    assert given["unconditional_token_logprobs"] is None
    assert len(given["normalized_prompt_logprobs"]) == len(given["input_token_logprobs"]) == len(given["choices"])
    return sgl.ChoicesDecision(given["choices"][-1], {"mine": True})


class ByUnconditional:
    """A choices method in SGLang's form, as an object."""

    requires_unconditional_logprobs = True

    def __call__(self, **given):
        return sgl.unconditional_likelihood_normalized(**given)


def choose(method, backend, choices=(" Paris", " Rome", " a")):
    return sgl.function(lambda s: s.__iadd__(CAPITAL + sgl.select("c", list(choices), choices_method=method)))(
        backend=backend
    )


def test_a_choices_method_may_be_a_function(backend):
    state = choose(last_choice, backend)
    assert state["c"] == " a"
    meta = state.get_meta_info("c")
    assert (meta["mine"], meta["choices_method"]) == (True, "last_choice")
    assert len(meta["cached_tokens"]) == 3


def test_a_choices_method_may_be_an_object(backend):
    state = choose(ByUnconditional(), backend)
    assert state["c"] == choose(sgl.unconditional_likelihood_normalized, backend)["c"]


@pytest.mark.parametrize("result", [None, sgl.ChoicesDecision("none of them"), " a"])
def test_a_choices_method_must_return_a_choice(result, in_process):
    state = choose(lambda **given: result, in_process)
    with pytest.raises(ProgramError, match="must return an object whose decision is one of"):
        state["c"]


def test_a_class_is_no_choices_method():
    with pytest.raises(RequestError, match="choices_method must be a ChoicesMethod"):
        sgl.select("c", ["a", "b"], choices_method=ByUnconditional)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (sgl.token_length_normalized, "b"),
        (sgl.greedy_token_selection, "a"),
        (sgl.unconditional_likelihood_normalized, "c"),
    ],
)
def test_the_choices_methods_can_be_called_with_sglangs_arguments(method, expected):
    decided = method(
        choices=["a", "b", "c"],
        normalized_prompt_logprobs=[-1.5, -0.7, -2.0],
        input_token_logprobs=[[[-0.5, 1, "x"], [-2.5, 2, None]], [[-0.7, 3, None]], [[-2.0, 4, None]]],
        output_token_logprobs=[[], [], []],
        unconditional_token_logprobs=[[[None, 1, None], [-2.5, 2, None]], [[-0.7, 3, None]], [[-9.0, 4, None]]],
    )
    assert decided.decision == expected
    assert decided.meta_info["normalized_prompt_logprobs"] == [-1.5, -0.7, -2.0]
    assert method.requires_unconditional_logprobs is (expected == "c")


def test_a_choices_method_without_the_logprobs_that_it_needs_is_refused():
    with pytest.raises(RequestError, match="needs unconditional_token_logprobs"):
        sgl.unconditional_likelihood_normalized(
            choices=["a"], normalized_prompt_logprobs=[-1.0], input_token_logprobs=[[[-1.0, 1, None]]]
        )


def test_forks_and_copies_take_position_offsets(in_process):
    @sgl.function
    def program(s):
        s += CAPITAL
        forks = s.fork(2, [10, 20])
        forks += sgl.gen("x", max_tokens=2)
        with s.copy(position_ids_offset=[5]) as c:
            c += sgl.gen("y", max_tokens=2)
        return [fork["x"] for fork in forks]

    state = program(backend=in_process, temperature=0)
    assert state.ret_value == [state["y"][0]] * 2


async def test_streamed_pieces_have_the_new_log_probabilities(backend):
    state = sgl.function(lambda s: s.__iadd__(CAPITAL + sgl.gen("x", return_logprob=True, top_logprobs_num=2)))(
        backend=backend, stream=True, temperature=0, max_new_tokens=24
    )
    total = 0
    async for piece, meta in state.text_async_iter("x", return_meta_data=True):
        assert piece
        new = len(meta["output_token_logprobs"])
        total += new
        assert len(meta["output_top_logprobs"]) == new
        assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == total
    whole = state.get_meta_info("x")
    assert len(whole["output_token_logprobs"]) == whole["output_token_logprobs_length"] >= total > 0


def test_a_failed_gen_leaves_its_error_in_the_state(backend, caplog):
    state = qa.compile(answer_len=4)(CAPITAL, backend=backend, temperature=-1.0)
    error = state.error()
    assert isinstance(error, ProgramError)
    assert "temperature" in str(error)
    assert "qa() ended with an error in its state" in caplog.text
    with pytest.raises(ProgramError, match="temperature"):
        state["answer"]


def test_error_waits_for_what_was_appended(backend):
    errors = []

    @sgl.function
    def program(s, top_p):
        s += CAPITAL + sgl.gen("x", max_tokens=2, top_p=top_p)
        errors.append(s.error())

    for top_p in (3.0, 0.5):
        program(top_p, backend=backend)
    assert "top_p" in str(errors[0])
    assert errors[1] is None


def test_an_endpoint_answers_sglangs_calls(server):
    with RuntimeEndpoint(server.url, None, None, "chatml") as endpoint:
        assert endpoint.get_model_name() == "demo"
        assert endpoint.get_server_info()["model_path"] == sgl.get_server_info(endpoint)["model_path"] == "demo"
        text = f"A prefix of process {os.getpid()} that is cached by a call. " * 2
        endpoint.cache_prefix(text)  # not awaited
        state = sgl.function(lambda s: s.__iadd__(text + sgl.gen("x", max_tokens=1)))(backend=endpoint)
        assert state.get_meta_info("x")["cached_tokens"] > 20
        assert (
            endpoint.request("POST", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}})["text"] == ""
        )
        chat = sgl.function(lambda s: s.__iadd__(sgl.user("Hi")))(backend=endpoint)
        assert chat.text() == "<|im_start|>user\nHi<|im_end|>\n"


async def test_a_call_of_an_endpoint_may_be_awaited(server):
    with RuntimeEndpoint(server.url) as endpoint:
        assert await endpoint.cache_prefix("Awaited in another event loop.") is None
        with pytest.raises(RuntimeError, match="of no use"):
            endpoint.cache_prefix("Closed").throw(RuntimeError("of no use"))
        endpoint.cache_prefix("Closed").close()


def test_an_engine_tells_its_configuration(in_process):
    info = sgl.get_server_info(in_process)
    assert info["config"]["model"]["path"] == "demo"
    assert info["stats"]["running_requests"] >= 0
    assert json.dumps(info)


def test_a_backend_without_server_info_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="get_server_info: OpenAI does not report"):
        sgl.get_server_info(OpenAI("m"))


@pytest.mark.parametrize("name", ["llama-3-instruct", "gemma-it", "chatml"])
def test_sglangs_names_of_chat_templates_are_known(name):
    RuntimeEndpoint("http://127.0.0.1:9", chat_template_name=name).close()


def test_a_file_of_certificates_that_is_none_is_refused(tmp_path):
    (tmp_path / "ca.pem").write_text("not a certificate")
    for file in (str(tmp_path / "ca.pem"), str(tmp_path / "missing"), 5.5):
        with pytest.raises(ConfigError, match="verify must be a file of certificates"):
            RuntimeEndpoint("https://127.0.0.1:9", verify=file)


def test_a_profile_is_started_and_stopped_by_a_call(server):
    with RuntimeEndpoint(server.url) as endpoint:
        endpoint.start_profile()
        qa(CAPITAL, backend=endpoint)
        endpoint.stop_profile()
    assert list(server.profile_dir.rglob("*.json*"))


def test_token_usage_counts_since_its_reset(server):
    with OpenAI("demo", base_url=f"{server.url}/v1", is_chat_model=False) as backend:
        assert not backend.is_chat_model
        qa(CAPITAL, backend=backend)
        first = backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens
        backend.token_usage.reset()
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (0, 0)
        qa(CAPITAL, backend=backend)
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == first == (8, 4)
        assert backend.usage.calls == 2


def test_a_runtime_serves_programs():
    with Runtime(model_path="demo", api_key="secret", config={"cache": {"page_size": 2}}) as runtime:
        sgl.set_default_backend(runtime)
        try:
            assert isinstance(qa(CAPITAL, temperature=0), ProgramState)
            assert sgl.get_server_info()["page_size"] == 2
            sgl.flush_cache()
        finally:
            sgl.set_default_backend(None)
        runtime.cache_prefix("A prefix.")
        runtime.start_profile()
        with RuntimeEndpoint(runtime.url) as without_key, pytest.raises(RequestError, match="401"):
            without_key.flush_cache()
        answer = json.loads(runtime.generate([CAPITAL], {"max_new_tokens": 2}, return_logprob=True))
        runtime.stop_profile()
        assert answer[0]["meta_info"]["output_token_logprobs_length"] == 2
        assert runtime.generate_url == f"{runtime.url}/generate"
    with pytest.raises(EngineError):
        runtime.generate("gone")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_path": "/no/such/folder"}, "/no/such/folder"),
        ({"model_path": "demo", "tp_size": 2}, "no option --tp-size; the setting is parallel.tensor"),
        ({"model_path": "demo", "launch_timeout": 0.01}, "not ready within 0.01 s"),
    ],
)
def test_a_runtime_that_does_not_start_shows_the_servers_log(options, says):
    with pytest.raises(EngineError, match=says):
        Runtime(**options)
