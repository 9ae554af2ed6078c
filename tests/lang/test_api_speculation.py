"""One call of an endpoint answers several `gen`s of a template, because the endpoint charges each prompt."""

import pytest

from graftlm import OpenAI, assistant, function, gen, select, separate_reasoning, system, user
from graftlm.errors import ProgramError, RequestError, RequestFailedError, UnsupportedFeatureError
from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel, writes_on

FORM = (
    "Construct a character within the following format:\n"
    "Name: Steve Jobs.\nBirthday: February 24, 1955.\nJob: Apple CEO.\nWelcome.\n"
    "\nPlease generate new Name, Birthday and Job.\n"
)
ANSWER = "Name: Marie Curie.\nBirthday: November 7, 1867.\nJob: Physicist."
FIELDS = {"name": " Marie Curie.", "birthday": " November 7, 1867.", "job": " Physicist."}
GOES_ON = f"{ANSWER}\nWelcome.\n\nName: Ada Lovelace.\nBirthday: December 10, 1815.\n"


def write_fields(s):
    s += FORM + "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("birthday", stop="\n")
    s += "\nJob:" + gen("job", stop="\n") + "\nWelcome.\n"


def write_message(s):
    s += system("You write characters.") + user(FORM)
    s += assistant(
        "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("birthday", stop="\n") + "\nJob:" + gen("job", stop="\n")
    )


def completing(*documents, **options):
    return ScriptedApi(ScriptedModel(writes_on(*[FORM + document for document in documents])), **options)


def run(write, api, *, num_tokens=None, is_chat=False, stream=False, **sampling):
    """Run a program; return the state and the backend."""
    with OpenAI("scripted", base_url=api.url, is_chat=is_chat) as backend:
        state = function(write, num_api_spec_tokens=num_tokens).run(backend=backend, stream=stream, **sampling)
        "".join(state.text_iter())  # waits for the end
        return state, backend


def test_three_fields_take_one_call_instead_of_three():
    with completing(GOES_ON) as alone, completing(GOES_ON) as ahead:
        plain, _ = run(write_fields, alone, temperature=0)
        guessed, backend = run(write_fields, ahead, num_tokens=64, temperature=0)
    assert {name: guessed[name] for name in FIELDS} == FIELDS
    assert guessed.text() == plain.text()
    assert (len(alone.bodies), len(ahead.bodies)) == (3, 1)
    assert 3.0 <= alone.prompt_tokens / ahead.prompt_tokens < 3.6
    usage = backend.usage
    assert (usage.calls, usage.saved_calls, usage.prompt_tokens) == (1, 2, ahead.prompt_tokens)
    assert usage.saved_prompt_tokens == pytest.approx(alone.prompt_tokens - ahead.prompt_tokens, rel=0.05)


@pytest.mark.parametrize(
    ("first", "later", "max_tokens", "num_calls"),
    [
        pytest.param("Name: Marie Curie.\nShe was a physicist.\n", ANSWER, None, 2, id="other constant text"),
        pytest.param("Name: Marie Curie.\n", ANSWER, None, 2, id="an early end"),
        pytest.param("Name: Marie Curie.\nBirthday: November 7, 1867.\n", ANSWER, None, 2, id="two of three"),
        pytest.param("Name: Marie Curie.\nBirthday:", ANSWER, None, 2, id="nothing behind constant text"),
        pytest.param(GOES_ON, GOES_ON, 2, 4, id="a field that max_tokens cuts"),
        pytest.param("Name:" + " John" * 200 + "\n", ANSWER, None, 4, id="a field that the default of max_tokens cuts"),
        pytest.param(GOES_ON.replace("\n", " "), GOES_ON, 6, 4, id="no end in sight"),
    ],
)
def test_a_wrong_speculation_changes_no_text_and_costs_at_most_one_call(first, later, max_tokens, num_calls):
    def says(prompt):
        return writes_on(FORM + (first if prompt == f"{FORM}Name:" else later))(prompt)

    num_tokens = 256 if max_tokens is None else 16
    with ScriptedApi(ScriptedModel(says)) as alone, ScriptedApi(ScriptedModel(says)) as ahead:
        plain, _ = run(write_fields, alone, temperature=0, max_tokens=max_tokens)
        guessed, backend = run(write_fields, ahead, num_tokens=num_tokens, temperature=0, max_tokens=max_tokens)
    assert guessed.text() == plain.text()
    assert len(alone.bodies) == 3
    assert len(ahead.bodies) == backend.usage.calls == num_calls <= len(alone.bodies) + 1


def test_a_speculation_may_be_right_for_some_of_the_fields():
    with completing(GOES_ON) as api:
        state, backend = run(write_fields, api, num_tokens=11, max_tokens=11, temperature=0)
    assert {name: state[name] for name in FIELDS} == FIELDS
    assert (backend.usage.calls, backend.usage.saved_calls) == (2, 1)


@pytest.mark.parametrize("tells_usage", [True, False])
def test_max_tokens_applies_to_a_speculated_field(tells_usage):
    def program(s):
        s += FORM + "Count:" + gen("count", stop="\n", max_tokens=4)

    with completing("Count: 1 2 3 4 5 6 7 8\n" + "antidisestablishmentarianism " * 40, tells_usage=tells_usage) as api:
        state, backend = run(program, api, num_tokens=64, temperature=0)
    assert state["count"] == " 1 2 3 4"
    assert state.get_meta_info("count")["finish_reason"]["type"] == "length"
    assert backend.usage.calls == 2


@pytest.mark.parametrize(("max_tokens", "num_calls"), [(19, 1), (18, 3)])
def test_a_field_is_used_if_its_bytes_are_within_max_tokens(max_tokens, num_calls):
    def program(s):
        s += FORM + "Name:" + gen("name", stop="\n", max_tokens=14)
        s += "\nBirthday:" + gen("birthday", stop="\n", max_tokens=max_tokens)

    with completing(GOES_ON) as api:  # " Marie Curie.\n" has 14 bytes, " November 7, 1867.\n" has 19
        state, _ = run(program, api, num_tokens=23, temperature=0)
    assert state["birthday"] == FIELDS["birthday"]
    assert len(api.bodies) == num_calls


def test_meta_info_says_whether_a_field_was_speculated():
    with completing(GOES_ON) as api:
        state, _ = run(write_fields, api, num_tokens=64, temperature=0)
        calls = [state.get_meta_info(name) for name in FIELDS]
    assert [meta["speculated"] for meta in calls] == [False, True, True]
    assert len({meta["id"] for meta in calls}) == 1
    assert sum(meta["prompt_tokens"] for meta in calls) == api.prompt_tokens
    assert all(meta["finish_reason"] == {"type": "stop", "matched": "\n"} for meta in calls)


def test_a_streamed_program_speculates():
    with completing(GOES_ON) as api:
        state, _ = run(write_fields, api, num_tokens=64, temperature=0, stream=True)
        assert "".join(state.text_iter("job")) == FIELDS["job"]
    assert len(api.bodies) == 1


def test_forks_do_not_share_a_sampled_speculation():
    def program(s):
        s += FORM + "Name:" + gen("name", stop="\n")
        forks = s.fork(2)
        forks += "\nBirthday:" + gen("birthday", stop="\n")
        forks.join()

    with completing(GOES_ON) as api:
        state, _ = run(program, api, num_tokens=64, temperature=0)
    assert state["birthday"] == [FIELDS["birthday"]] * 2
    assert len(api.bodies) == 3


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"stop": "\n", "temperature": 0.5}, id="another temperature"),
        pytest.param({"stop": "\n", "n": 2}, id="several"),
        pytest.param({"stop": "\n", "return_logprob": True}, id="log-probabilities"),
        pytest.param({"max_tokens": 5}, id="an end that is not in the text"),
    ],
)
def test_a_field_that_the_longer_completion_lacks_is_requested(later):
    def program(s):
        s += FORM + "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("birthday", **later)

    with completing(GOES_ON) as api:
        state, _ = run(program, api, num_tokens=64, temperature=0)
    assert len(api.bodies) == 2
    assert FIELDS["birthday"] in state["birthday"]


@pytest.mark.parametrize(("num_fields", "num_calls", "num_compiled"), [(3, 3, 3), (2, 3, 3), (1, 3, 1)])
def test_a_compiled_program_makes_no_additional_calls(num_fields, num_calls, num_compiled):
    @function(num_api_spec_tokens=64)
    def program(s):
        s += FORM + "Name:"
        forks = s.fork(3)
        forks += gen("name", stop="\n")
        for field in ("Birthday", "Job")[: num_fields - 1]:
            forks += f"\n{field}:" + gen(field.lower(), stop="\n")
        forks.join()

    with completing(GOES_ON) as api, OpenAI("scripted", base_url=api.url, is_chat=False) as backend:
        for run_once, num in ((program.run, num_calls), (program.compile().run, num_compiled)):
            before = backend.usage
            state = run_once(backend=backend, temperature=0)
            assert all(state[name] == [FIELDS[name]] * 3 for name in list(FIELDS)[:num_fields])
            assert (backend.usage - before).calls == num


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_with_penalties_each_gen_makes_its_own_call(penalty):
    with completing(GOES_ON) as api:
        state, backend = run(write_fields, api, num_tokens=64, temperature=0, **{penalty: 0.5})
    assert {name: state[name] for name in FIELDS} == FIELDS
    assert [body["stop"] for body in api.bodies] == [["\n"]] * 3
    assert backend.usage.saved_calls == 0


def test_the_end_of_the_completion_ends_the_last_gen():
    def program(s):
        s += FORM + "Name:" + gen("name", stop="\n") + "\nBirthday:" + gen("rest")

    with completing(ANSWER) as api:
        state, _ = run(program, api, num_tokens=64, temperature=0)
    assert state["rest"] == " November 7, 1867.\nJob: Physicist."
    assert len(api.bodies) == 1


@pytest.mark.parametrize(("kind", "num_calls"), [(" cat", 2), (" dog", 3)])
def test_speculation_continues_after_a_select_that_chooses_the_models_text(kind, num_calls):
    def program(s):
        s += FORM + "Name:" + gen("name", stop="\n") + "\nKind:" + select("kind", [" cat", " dog"])
        s += "\nAge:" + gen("age", stop="\n")

    def says(prompt):
        return writes_on(f"{FORM}Name: Tom\nKind: cat\nAge: 3\n", f"{FORM}Name: Tom\nKind: dog\nAge: 4\n")(prompt)

    model = ScriptedModel(says, logprob=lambda text, token: -0.1 if token == kind else -2.0)
    with ScriptedApi(model) as api:
        state, backend = run(program, api, num_tokens=64, temperature=0)
    assert state["age"] == {" cat": " 3", " dog": " 4"}[kind]
    assert backend.usage.calls == num_calls  # one of the calls is for the select


def test_a_whole_chat_message_takes_one_call():
    with ScriptedApi(ScriptedModel(lambda prompt: ANSWER)) as api:
        state, backend = run(write_message, api, num_tokens=64, is_chat=True, temperature=0, max_tokens=20)
    assert {name: state[name] for name in FIELDS} == FIELDS
    assert state.messages()[-1] == {"role": "assistant", "content": ANSWER}
    (body,) = api.bodies
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["max_tokens"] == 64
    assert backend.usage.saved_calls == 2


def test_a_message_in_another_format_is_an_error():
    with (
        ScriptedApi(ScriptedModel(lambda prompt: "Here you are:\n" + ANSWER)) as api,
        pytest.raises(ProgramError, match="start with the program's text 'Name:', but it is 'Here you are:") as caught,
    ):
        run(write_message, api, num_tokens=64, is_chat=True)
    assert isinstance(caught.value.__cause__, RequestFailedError)
    assert len(api.bodies) == 1


def test_a_message_of_several_gens_needs_speculation_or_continue_final_message():
    with ScriptedApi(ScriptedModel(lambda prompt: ANSWER)) as api:
        with pytest.raises(ProgramError, match="num_api_spec_tokens") as caught:
            run(write_message, api, is_chat=True)
        assert isinstance(caught.value.__cause__, UnsupportedFeatureError)
        assert api.bodies == []
        with OpenAI("scripted", base_url=api.url, continue_final_message=True) as backend:
            state = function(write_message).run(backend=backend)
    assert {name: state[name] for name in FIELDS} == FIELDS
    assert all(body["continue_final_message"] for body in api.bodies)
    assert len(api.bodies) == 3


def test_other_backends_send_a_request_for_each_gen(in_process):
    @function(num_api_spec_tokens=64)
    def program(s):
        s += "1 + 1 =" + gen("sum", stop=".", max_tokens=4) + ". 2 + 2 =" + gen("more", stop=".", max_tokens=4)

    state = program.run(backend=in_process, temperature=0)
    assert state.get_meta_info("more")["prompt_tokens"] > state.get_meta_info("sum")["prompt_tokens"] > 0


@pytest.mark.parametrize(("field", "num_calls"), [("Marie Curie.", 1), ("Marie " * 30, 4)])
def test_without_token_counts_a_field_counts_as_its_number_of_bytes(field, num_calls):
    answer = f"Name: {field}\nBirthday: November 7, 1867.\nJob: Physicist."
    with completing(answer, tells_usage=False) as api:
        state, backend = run(write_fields, api, num_tokens=512, temperature=0)
    assert state.text() == FORM + answer + "\nWelcome.\n"
    assert (backend.usage.calls, backend.usage.prompt_tokens) == (num_calls, 0)


def test_a_server_generates_the_same_text_with_speculation(server):
    texts = []
    for num_tokens in (None, 96):
        with OpenAI("demo", base_url=f"{server.url}/v1", is_chat=False) as backend:
            program = function(write_fields, num_api_spec_tokens=num_tokens)
            texts.append(program.run(backend=backend, temperature=0, max_tokens=24).text())
    assert texts[0] == texts[1]
    assert backend.usage.calls <= 4


def test_the_reasoning_of_a_message_is_reported_once():
    def program(s):
        s += user(FORM)
        s += assistant(
            "Name:"
            + separate_reasoning(gen("name", stop="\n"), "qwen3")
            + "\nBirthday:"
            + separate_reasoning(gen("birthday", stop="\n"), "qwen3")
        )

    with ScriptedApi(ScriptedModel(lambda prompt: ANSWER, reasons=lambda prompt: "A physicist.")) as api:
        state, _ = run(program, api, num_tokens=64, is_chat=True)
    assert (state["name"], state["birthday"]) == (FIELDS["name"], FIELDS["birthday"])
    assert [state[f"{name}_reasoning_content"] for name in ("name", "birthday")] == ["A physicist.", ""]
    assert len(api.bodies) == 1


def test_num_api_spec_tokens_must_be_positive():
    with pytest.raises(RequestError, match="num_api_spec_tokens must be at least 1"):
        function(num_api_spec_tokens=0)(lambda s: None)
