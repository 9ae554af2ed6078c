"""Every primitive on both backends."""

import json
import re
from contextlib import suppress

import pytest
from pydantic import BaseModel, ConfigDict

from graftlm import (
    RuntimeEndpoint,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from graftlm.errors import ProgramError, RequestError, SamplingParamsError, UnsupportedFeatureError
from graftlm.lang import ChoicesMethod, Decision, EngineBackend

CAPITAL = "The capital of France is"


def one(expr, backend, prompt=CAPITAL, **defaults):
    """Run a program with one expression."""

    @function
    def program(s):
        s += prompt
        s += expr

    return program.run(backend=backend, **({"temperature": 0, "max_new_tokens": 16} | defaults))


def test_text_at_temperature_0_equals_the_engines(engine, backend):
    state = one(gen("city"), backend)
    assert state["city"] == engine.generate(CAPITAL, {"temperature": 0, "max_tokens": 16})[0].text
    assert state.text() == CAPITAL + state["city"]
    assert state.get_var("city") == state["city"]


def test_meta_info_has_the_token_counts_and_the_finish_reason(backend):
    meta = one(gen("city", stop="."), backend).get_meta_info("city")
    assert meta["finish_reason"] == {"type": "stop", "matched": "."}
    assert meta["prompt_tokens"] > meta["completion_tokens"] > 0
    assert meta["cached_tokens"] <= meta["prompt_tokens"]


def test_parameters_of_a_gen_override_those_of_the_run(backend):
    state = one(gen("city", max_tokens=2), backend, max_new_tokens=16)
    assert state.get_meta_info("city")["completion_tokens"] == 2


def test_max_tokens_is_a_default_with_either_name(backend):
    @function
    def program(s):
        s += CAPITAL + gen("city")

    for name in ("max_tokens", "max_new_tokens"):
        state = program.run(backend=backend, temperature=0, **{name: 3})
        assert state.get_meta_info("city")["completion_tokens"] == 3


def test_n_returns_a_list_and_appends_the_first(backend):
    state = one(gen("x", n=3, max_tokens=4, temperature=1.0), backend)
    assert len(state["x"]) == len(state.get_meta_info("x")) == 3
    assert state.text() == CAPITAL + state["x"][0]


def test_ignore_eos_and_min_tokens_continue_after_the_end_token(backend):
    assert one(gen("x", ignore_eos=True, max_tokens=30), backend).get_meta_info("x")["completion_tokens"] == 30
    assert one(gen("x", min_tokens=20, max_tokens=30), backend).get_meta_info("x")["completion_tokens"] >= 20


def test_sampling_parameters_are_passed_to_the_backend(backend):
    state = one(
        gen("x", temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.1), backend
    )
    assert state["x"]
    assert one(gen("y", top_k=-1), backend)["y"]


def test_stop_token_ids_end_the_text(engine, backend):
    whole = engine.generate(CAPITAL, {"temperature": 0, "max_tokens": 8})[0].token_ids
    meta = one(gen("x", stop_token_ids=[whole[1]]), backend).get_meta_info("x")
    assert meta["finish_reason"] == {"type": "stop", "matched": whole[1]}


def test_logprobs_have_the_names_and_shapes_of_sglang(engine, backend):
    meta = one(
        gen("x", max_tokens=3, return_logprob=True, logprob_start_len=0, top_logprobs_num=2), backend
    ).get_meta_info("x")
    expected = engine.generate(CAPITAL, {"temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 2})[0]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == list(expected.token_ids)
    assert [p for p, *_ in meta["output_token_logprobs"]] == pytest.approx([t.logprob for t in expected.logprobs])
    assert [token for _, token, _ in meta["input_token_logprobs"]] == list(expected.prompt_token_ids)
    assert meta["input_token_logprobs"][0][0] is None
    assert [p for p, *_ in meta["input_token_logprobs"][1:]] == pytest.approx(
        [t.logprob for t in expected.prompt_logprobs[1:]], abs=1e-5
    )
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"][1]) == 2


def test_logprobs_can_include_texts(backend):
    meta = one(gen("x", max_tokens=3, return_logprob=True, return_text_in_logprobs=True), backend).get_meta_info("x")
    assert "".join(text for *_, text in meta["output_token_logprobs"]) == one(gen("x", max_tokens=3), backend)["x"]


@pytest.mark.parametrize(
    ("expr", "pattern"),
    [
        (gen("x", dtype=int), r"[-+]?[0-9]+"),
        (gen_int("x"), r"[-+]?[0-9]+"),
        (gen("x", dtype="float"), r"[-+]?[0-9]*\.?[0-9]+"),
        (gen("x", dtype=bool), "True|False"),
        (gen_string("x", max_tokens=40), r'"[\w\d\s]*"?'),
        (gen("x", regex="(red|green), [0-9]{2}"), "(red|green), [0-9]{2}"),
    ],
)
def test_constrained_text_matches_its_pattern(expr, pattern, backend):
    assert re.fullmatch(pattern, one(expr, backend, prompt="The answer is ")["x"])


def test_a_json_schema_may_be_a_dict_a_text_or_a_class(backend):
    class Verdict(BaseModel):
        model_config = ConfigDict(extra="forbid")
        ok: bool

    schema = Verdict.model_json_schema()
    for form in (schema, json.dumps(schema), Verdict):
        state = one(gen("x", json_schema=form, max_tokens=64), backend, prompt="JSON: ")
        assert isinstance(json.loads(state["x"])["ok"], bool)


def test_gen_with_choices_selects(backend):
    assert one(gen("x", choices=[" Athens", " Lima"]), backend)["x"] == " Athens"
    assert one(gen("x", choices=[" Athens"], choices_method="greedy_token_selection"), backend)["x"] == " Athens"


def test_roles_use_the_models_chat_format(engine, backend):
    @function
    def program(s):
        s += system("Be brief.")
        s += user("What is " + select("sum", ["2 + 3", "4 + 4"]) + "?")
        s += assistant(gen("answer"))
        s.user("Thanks.")
        with s.assistant():
            s += gen("reply", max_tokens=8)

    state = program.run(backend=backend, temperature=0)
    messages = state.messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == state["answer"]
    assert messages[4]["content"] == state["reply"]
    whole = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert engine.tokenizer.prompt_prefix + state.text() == whole
    direct = engine.generate([messages[:2]], {"temperature": 0})[0]
    assert state["answer"] == direct.text
    assert state.get_meta_info("answer")["prompt_tokens"] == len(direct.prompt_token_ids)


def test_begin_and_end_equal_whole_messages(backend):
    @function
    def apart(s):
        s += system_begin() + "Be brief." + system_end()
        s += user_begin() + "What is 2 + 3?" + user_end()
        s += assistant_begin() + gen("x") + assistant_end()

    @function
    def whole(s):
        s += system("Be brief.") + user("What is 2 + 3?") + assistant(gen("x"))

    first, second = (program.run(backend=backend, temperature=0) for program in (apart, whole))
    assert first.text() == second.text()
    assert first.messages() == second.messages()


def test_var_scope_stores_the_text_within(backend):
    @function
    def program(s):
        s += CAPITAL
        with s.var_scope("sentence"):
            s += " not" + gen("x", max_tokens=3) + "!"
        s += " Well."

    state = program.run(backend=backend, temperature=0)
    assert state["sentence"] == " not" + state["x"] + "!"


def test_variables_can_be_set_and_tested_for(backend):
    @function
    def program(s):
        s["a"] = 1
        s.set_var("b", [2])
        assert "a" in s
        assert "c" not in s
        return s["a"]

    state = program.run(backend=backend)
    assert state["b"] == [2]
    assert state.ret_value == 1


def test_a_program_can_call_another_with_its_own_state(backend):
    @function
    def part(s, name):
        s += CAPITAL + gen(name, max_tokens=2)
        return name

    @function
    def program(s):
        return part(s, "x")

    state = program.run(backend=backend, temperature=0)
    assert state[state.ret_value]


def test_videos_and_what_is_no_picture_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="no backend"):
        video("a.mp4", 4)
    with pytest.raises(RequestError, match="got int"):
        image(5)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: gen("x", regex="("), SamplingParamsError, "not a regular expression"),
        (lambda: gen("x", dtype=list), SamplingParamsError, "dtype must be one of"),
        (lambda: gen("x", stop=[1]), SamplingParamsError, "stop must be"),
        (lambda: select("x", []), RequestError, "needs choices"),
        (lambda: select("x", ["a", ""]), RequestError, "needs choices"),
        (lambda: select("x", ["a"], choices_method="best"), RequestError, "choices_method must be one of"),
        (lambda: select("x", ["a"], temperature=0.5), SamplingParamsError, "temperature must be 0"),
        (lambda: gen("x") + 3, RequestError, "write str"),
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_appended(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_dtype_beside_a_regex_is_refused(backend):
    with pytest.raises(ProgramError, match="cannot be combined with regex"):
        one(gen("x", dtype=int, regex="a"), backend).text()


def test_a_server_without_a_template_uses_the_named_one(server):
    with RuntimeEndpoint(server.url, chat_template="chatml") as endpoint:
        state = one(user("Hi") + assistant(gen("x", max_tokens=1)), endpoint, prompt="")
    assert state.text().startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_an_error_ends_open_messages_and_scopes(in_process):
    @function
    def program(s):
        with suppress(LookupError), s.user(), s.var_scope("said"):
            s += "Hello"
            raise LookupError
        s += assistant("Yes")
        return s["said"]

    state = program.run(backend=in_process)
    assert state.ret_value == "Hello"
    assert [message["content"] for message in state.messages()] == ["Hello", "Yes"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"return_logprob": True}, {"n": 2}])
def test_max_tokens_may_be_zero(given, stream, backend):
    state = function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=0, **given))).run(
        backend=backend, stream=stream, temperature=0
    )
    texts, metas = state["x"], state.get_meta_info("x")
    if "n" not in given:
        texts, metas = [texts], [metas]
    assert state.text() == "1 + 1 ="
    for text, meta in zip(texts, metas, strict=True):
        assert text == ""
        assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
        assert meta["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop_regex": 5}, "stop_regex must be"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"regex": 5}, "regex must be a string, got 5"),
        ({"dtype": 5}, "dtype must be one of"),
        ({"dtype": [int]}, "dtype must be one of"),
        ({"json_schema": 5}, "json_schema must be a dict"),
        ({"choices": ["a"], "regex": "a"}, "gen takes choices or regex, got both"),
        ({"choices": ["a"], "dtype": int}, "gen takes choices or dtype, got both"),
    ],
)
def test_contradictory_arguments_of_a_gen_are_refused_at_once(arguments, says):
    with pytest.raises(SamplingParamsError, match=says):
        gen("x", **arguments)


class Person(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gen(["a"]), "gen: name must be a string"),
        (lambda: gen(3), "gen: name must be a string"),
        (lambda: select(3, ["a"]), "select: name must be a string"),
        (lambda: select("x", ["a"], choices_method=3), "choices_method must be"),
        (lambda: gen("x", json_schema=Person(name="a")), "a pydantic model class"),
        (lambda: f"x{gen('x')}", r"append it with \+"),
        (lambda: function(lambda s, stream: None), "argument stream, which is an option of run"),
        (lambda: ChoicesMethod("mine", lambda scores: 3).take([]), "'mine' must return a Decision"),
        (lambda: ChoicesMethod("mine", lambda scores: Decision(1, ())).take([]), "'mine' must return a Decision"),
    ],
)
def test_invalid_expressions_are_refused_by_name(make, says):
    with pytest.raises((RequestError, ProgramError), match=says):
        make()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": -1}, "max_tokens must be a whole number of at least 0"),
        ({"temperature": "0"}, "temperature must be a number, got str '0'"),
        ({"temperature": -1}, "temperature must be between 0 and 100"),
    ],
)
def test_the_error_for_a_refused_value_has_its_type_and_limit(in_process, options, says):
    with pytest.raises(ProgramError, match=says):
        function(lambda s: s.__iadd__("a" + gen("x", **options))).run(backend=in_process).text()


def test_more_completions_than_any_engine_supports_are_refused_first(narrow_engine):
    for n, says in ((129, "n must be between 1 and 128"), (5, "queue has room for 4")):
        with pytest.raises(ProgramError, match=says):
            function(lambda s, n: s.__iadd__("a" + gen("x", n=n))).run(n=n, backend=EngineBackend(narrow_engine)).text()
