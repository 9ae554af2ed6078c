"""The plan of an answer to a chat: the place where a grammar begins, and the use of tools."""

import asyncio
import json

import pytest

from graftlm.chat.chat_formats import ChatFormats
from graftlm.contracts import ToolChoice
from graftlm.server.errors import ApiError
from graftlm.server.openai.plan import plan_answer, settled
from graftlm.server.openai.requests import ChatRequest
from graftlm_chat.hermes import HermesFormat
from graftlm_chat.mistral import MistralFormat
from graftlm_chat.pythonic import PythonicFormat
from graftlm_chat.think import ThinkFormat


class Manager:
    """A fake tokenizer manager with the methods that a plan needs; its prompts end with the given text."""

    def __init__(self, prompt_end, formats=None, tokens=()):
        self.prompt_end = prompt_end
        self.tokens = tokens
        self.chat_formats = formats or ChatFormats(reasoning=ThinkFormat())
        self.checked = []
        self.preparer = self

    def is_token(self, text):
        return text in self.tokens

    async def enforces(self, params):
        return True

    async def check_params(self, params):
        self.checked.append((json.loads(params.json_schema)["title"], params.strict))


def plan(prompt_end, manager=None, **fields):
    body = ChatRequest(messages=[{"role": "user", "content": "Hi"}], **fields)
    return settle(body, manager or Manager(prompt_end))


def settle(body, manager):
    """Return the plan of an answer to a prompt that ends with the manager's `prompt_end`."""
    return settled(asyncio.run(plan_answer(body, manager)), manager.prompt_end, manager.is_token)


def tool(name, strict=None, **schema):
    parameters = {"type": "object", "title": name, **schema}
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


def plan_calls(format_, tools, **fields):
    manager = Manager("", ChatFormats(tool_calls=format_))
    return plan("", manager, tools=tools, **{"tool_choice": "required"} | fields), manager


GRAMMARS = {
    "choice": ["yes", "no"],
    "regex": "yes|no",
    "ebnf": 'root ::= "yes"',
    "json_schema": "{}",
    "structural_tag": {
        "triggers": ["<n>"],
        "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
        "at_least_one": True,
    },
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_begins_after_the_reasoning_that_the_prompt_opens(name):
    planned = plan("<think>\n", **{name: GRAMMARS[name]})
    assert (planned.params.reasoning_end, planned.params.reasoning_begin) == ("</think>", None)
    assert planned.params.grammar_field == name
    assert planned.reasoning is not None
    assert planned.is_open


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_model_may_begin_its_reasoning_if_the_tag_is_one_token(name):
    manager = Manager("assistant\n", tokens=("<think>",))
    planned = plan("", manager, **{name: GRAMMARS[name]})
    assert (planned.params.reasoning_end, planned.params.reasoning_begin) == ("</think>", "<think>")
    assert planned.reasoning is not None
    assert not planned.is_open


@pytest.mark.parametrize("fields", [{}, {"prompt_end": "<think>\n\n</think>\n\n", "tokens": ("<think>",)}])
@pytest.mark.parametrize("name", GRAMMARS)
def test_without_a_detectable_reasoning_the_grammar_applies_to_the_whole_output(name, fields):
    planned = plan("", Manager(**{"prompt_end": "assistant\n"} | fields), **{name: GRAMMARS[name]})
    assert (planned.params.reasoning_end, planned.params.reasoning_begin) == (None, None)
    assert planned.params.grammar_field == name
    assert planned.reasoning is None


@pytest.mark.parametrize("spell", [json.dumps, dict])
@pytest.mark.parametrize(("at_least_one", "has_reasoning"), [(False, True), (None, True), (True, False)])
def test_a_structural_tag_allows_reasoning_unless_it_requires_a_structure(spell, at_least_one, has_reasoning):
    tag = GRAMMARS["structural_tag"] | {"at_least_one": at_least_one}
    assert (plan("assistant\n", structural_tag=spell(tag)).reasoning is not None) == has_reasoning


def test_without_a_grammar_there_is_no_end_of_reasoning():
    planned = plan("<think>")
    assert planned.params.reasoning_end is None
    assert planned.is_open


@pytest.mark.parametrize(
    ("begun", "is_within", "answer"),
    [
        ("<think>Let me", True, [("reasoning", " see"), ("content", "4")]),
        ("<think>Let me see</think>\n\n", False, [("content", " see</think>4")]),
        ("<think>So</think>4", False, [("content", " see</think>4")]),
        ("It is", False, [("content", " see</think>4")]),
        ("", False, [("content", " see</think>4")]),
    ],
)
def test_an_answer_is_parsed_as_the_continuation_of_the_clients_beginning(begun, is_within, answer):
    body = ChatRequest(
        messages=[{"role": "user", "content": "<think>"}, {"role": "assistant", "content": begun}],
        continue_final_message=True,
        choice=["4"],
    )
    planned = settle(body, Manager(begun[-9:], tokens=("<think>",)))
    assert (planned.params.reasoning_end is not None) == is_within or not begun
    free = settle(replace_choice(body), Manager(begun[-9:]))
    reader = free.reader()
    deltas = [*reader.push(" see</thi"), *reader.push("nk>4"), *reader.finish(None)]
    texts = {"reasoning": "", "content": ""}
    for delta in deltas:
        for name, text in (("reasoning", delta.reasoning_content), ("content", delta.content)):
            texts[name] += text or ""
    assert [(name, text) for name, text in texts.items() if text] == answer


def replace_choice(body):
    return body.model_copy(update={"choice": None})


NAMED = {"type": "function", "function": {"name": "b"}}
TOOLS = [tool("a"), tool("b", properties={"n": {"type": "integer", "minimum": 1}})]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    ("format_", "place"), [(HermesFormat(), "$.structures[{}].schema"), (MistralFormat(), "$.$defs.tool{}")]
)
def test_a_schema_part_that_the_backend_does_not_enforce_is_reported_by_its_path_in_the_request(format_, place, choice):
    planned, _ = plan_calls(format_, TOOLS, tool_choice=choice)
    place = place.format(planned.use.indices.index(1))
    assert planned.unenforced([f"{place}.properties.n.not"]) == ("tools[1].function.parameters.properties.n.not",)
    assert planned.use.choice is ToolChoice.REQUIRED


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_schema_part_that_the_format_does_not_enforce_is_reported_too(choice):
    planned, _ = plan_calls(PythonicFormat(), TOOLS, tool_choice=choice)
    assert planned.unenforced([]) == ("tools[1].function.parameters.properties.n.minimum",)


def test_each_tool_has_its_own_strictness():
    tools = [tool("a", strict=True), tool("b", strict=False), tool("c")]
    for default, checked in ((True, True), (False, False), (None, False)):
        planned, manager = plan_calls(HermesFormat(), tools, strict=default)
        assert manager.checked == [("a", True), ("b", False), ("c", checked)]
    assert planned.params.strict is False
    assert planned.unenforced(["$.structures[2].schema.not"]) == ("tools[2].function.parameters.not",)
    with pytest.raises(ApiError, match=r"^tools\[0\]\.function\.parameters\.not: ") as caught:
        planned.unenforced(["$.structures[1].schema.not", "$.structures[0].schema.not"])
    assert caught.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize(
    ("beside", "own", "strict"),
    [(None, None, True), (False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_the_strictness_of_a_schema_overrides_that_of_the_request(beside, own, strict):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": own, "schema": {}}}
    assert plan("", response_format=wanted, strict=beside).params.strict is strict


STRUCTURES = [{"begin": "<n>", "schema": {}, "end": "</n>"}]


@pytest.mark.parametrize(
    ("wanted", "param", "says"),
    [
        ({"type": "json_object", "json_schema": {"name": "x", "schema": {}}}, "json_schema", "set type: 'json_schema'"),
        (
            {"type": "text", "json_schema": {"name": "x", "schema": {}}},
            "json_schema",
            "is not allowed with type 'text'",
        ),
        ({"type": "text", "at_least_one": False}, "at_least_one", "set type: 'structural_tag', or leave the field out"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}, "triggers": ["<"]},
            "triggers",
            "set type",
        ),
        (
            {"type": "structural_tag", "triggers": ["<"], "structures": STRUCTURES, "json_schema": {"name": "x"}},
            "json_schema",
            "is not allowed with type 'structural_tag'",
        ),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema", "the schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": None}}, "json_schema.schema", "missing"),
    ],
)
def test_a_response_format_with_fields_of_another_type_is_refused(wanted, param, says):
    with pytest.raises(ApiError, match=says) as caught:
        plan("", response_format=wanted)
    assert caught.value.param == f"response_format.{param}"


@pytest.mark.parametrize("parallel", [False, None])
@pytest.mark.parametrize("step", [1, 1000])
def test_only_the_first_call_is_returned_if_parallel_calls_are_off(parallel, step):
    text = "[a(), b(n=2)]"
    planned, _ = plan_calls(PythonicFormat(), TOOLS, tool_choice="auto", parallel_tool_calls=parallel)
    assert planned.calls is None  # no grammar enforces it
    reader = planned.reader()
    for i in range(0, len(text), step):
        reader.push(text[i : i + step])
    reader.finish(None)
    calls = [call.function.name for call in reader.message().tool_calls]
    assert calls == (["a"] if parallel is False else ["a", "b"])


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(mode):
    tools = [tool("a"), tool("b"), tool("c")]
    planned, manager = plan_calls(HermesFormat(), tools, tool_choice=allowed(mode, "c", "a", "c"))
    assert [one.name for one in planned.use.tools] == ["a", "c"]
    assert (planned.use.indices, planned.use.choice.value, planned.use.parallel) == ((0, 2), mode, True)
    assert [name for name, _ in manager.checked] == ["a", "c"]
    assert planned.unenforced(["$.structures[1].schema.not"]) == ("tools[2].function.parameters.not",)


def test_an_unknown_allowed_tool_is_refused():
    with pytest.raises(ApiError, match="there is no tool 'x'; tools: a, b") as caught:
        plan_calls(HermesFormat(), TOOLS, tool_choice=allowed("auto", "a", "x"))
    assert caught.value.param == "tool_choice.allowed_tools.tools.1.function.name"


def test_a_tag_of_a_response_format_may_contain_a_regular_expression():
    structures = [{"begin": "<a>", "regex": "[0-9]", "end": ""}, {"begin": "<b>", "end": ""}]
    wanted = {"type": "structural_tag", "triggers": ["<"], "structures": structures}
    found = plan("", response_format=wanted).params.structural_tag["structures"]
    assert found == [{"begin": "<a>", "regex": "[0-9]", "end": ""}, {"begin": "<b>", "schema": {}, "end": ""}]
