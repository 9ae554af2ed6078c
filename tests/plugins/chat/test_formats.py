"""The chat formats keep their contracts, and parse the output of their models."""

import json
import re

import pytest

import graftlm_chat
from graftlm.contracts import (
    ChatFormatContext,
    ContentDelta,
    NoOptions,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolChoice,
)
from graftlm.errors import GrammarError
from graftlm.testing import ReasoningFormatConformance, ToolCallFormatConformance

CALLS = {provider.name: provider for provider in graftlm_chat.provide_tool_call_formats()}
REASONING = {provider.name: provider for provider in graftlm_chat.provide_reasoning_formats()}
TOOLS = [Tool("f"), Tool("get-x")]


def make(provider, context=None):
    return provider.create(NoOptions(), context or ChatFormatContext())


class TestHermes(ToolCallFormatConformance):
    def create(self, context):
        return make(CALLS["hermes"], context)


class TestMistral(ToolCallFormatConformance):
    def create(self, context):
        return make(CALLS["mistral"], context)


class TestLlama3Json(ToolCallFormatConformance):
    def create(self, context):
        return make(CALLS["llama3_json"], context)


class TestPythonic(ToolCallFormatConformance):
    def create(self, context):
        return make(CALLS["pythonic"], context)


class TestThink(ReasoningFormatConformance):
    def create(self, context):
        return make(REASONING["think"], context)


class TestNone(ReasoningFormatConformance):
    def create(self, context):
        return make(REASONING["none"], context)


def read(name, text, *, enforced=False):
    parser = make(CALLS[name]).parser(TOOLS, enforced=enforced)
    content, calls = "", []
    for delta in [*parser.push(text), *parser.finish()]:
        if not isinstance(delta, ToolCallDelta):
            content += delta.text
        elif delta.name is not None:
            calls.append([delta.name, delta.arguments])
        else:
            calls[-1][1] += delta.arguments
    return content, calls


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Wait.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "Wait.", [["f", "{}"]]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [["f", '{"a": 1}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
        ("hermes", '<tool_call>{"name": "f"}', "", [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -1e400}}', None, []),
        ("hermes", '<tool_call>{"arguments": {"a": [1e400]}, "name": "f"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1e400}"}</tool_call>', None, []),
        ("mistral", '[{"name": "f", "arguments": {"a": 1e400}}]', None, []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1e400}}', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e308}}', "", [["f", '{"a": 1e308}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "", [["f", '{"a": "\\ud800"}']]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
        ("llama3_json", '{"name": "f", "parameters": {}};{"name": "f"}', "", [["f", "{}"], ["f", "{}"]]),
        ("llama3_json", '{"name": "Alice"}', '{"name": "Alice"}', []),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', "", [["f", '{"a": "]"}']]),
        ("mistral", '[{"name": "f", "arguments": {}}, {"name": "get-x", "arguments": {}}]', "", None),
        ("mistral", "[1, 2]", "[1, 2]", []),
        ("pythonic", '[f(a=-1.5, b="]", c=true, **{"x-y": (1, None)})]', "", None),
        ("pythonic", "[get_x()]", "", [["get-x", "{}"]]),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
        ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
        ("pythonic", "[f(a=-1e999)]", "[f(a=-1e999)]", []),
        ("pythonic", "[f(a=[1, {'b': 1e400}])]", None, []),
        ("pythonic", f"[f(a=0x{'f' * 5000})]", None, []),
        ("pythonic", "[f(a=" + "(" * 500 + ")" * 500 + ")]", None, []),
        ("pythonic", "[f(a='\\d')]", "", [["f", '{"a": "\\\\d"}']]),
    ],
)
def test_the_output_of_models_is_parsed(name, text, content, calls):
    said, called = read(name, text)
    assert said == (text if content is None else content)
    assert called == calls if calls is not None else all(isinstance(json.loads(text), dict) for _, text in called)
    assert called or calls == []


@pytest.mark.parametrize("text", ["[" * 10**6, "[f(a=[" + "[]," * 30_000, "[f(), " * 20_000])
def test_text_that_may_be_python_calls_is_held_back_up_to_a_limit(text):
    parser = make(CALLS["pythonic"]).parser(TOOLS, enforced=False)
    assert not parser.push(text[:65_536])
    deltas = [*parser.push(text[65_536])]
    assert deltas
    deltas += [delta for i in range(65_537, len(text), 4096) for delta in parser.push(text[i : i + 4096])]
    assert "".join(delta.text for delta in [*deltas, *parser.finish()]) == text


def test_enforced_python_calls_are_returned_one_by_one():
    parser = make(CALLS["pythonic"]).parser(TOOLS, enforced=True)
    pieces = ["[f(a=1", ", b=[2])", ", get", "_x()", " ]", "."]
    news = [[getattr(delta, "name", delta) for delta in parser.push(piece)] for piece in pieces]
    assert news == [[], ["f", None], [], ["get-x", None], [], [ContentDelta(".")]]


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[f(a=1), get_x(), f(a=", ["f", "get-x"]),
        ("[f(a='),('), ", ["f"]),
        ("[f(a=[1, 2], b={'c': (", []),
        ("[f(", []),
    ],
)
def test_complete_python_calls_before_a_truncation_are_returned(text, names, enforced):
    parser = make(CALLS["pythonic"]).parser(TOOLS, enforced=enforced)
    deltas = [delta for piece in [*text] for delta in parser.push(piece)] + [*parser.cut_off()]
    assert [delta.name for delta in deltas if delta.name is not None] == names


def test_python_text_that_is_not_a_call_is_content_from_there_on():
    text = "[f(), g(), f()]"
    assert read("pythonic", text) == (text, [])
    assert read("pythonic", text, enforced=True) == (", g(), f()]", [["f", "{}"]])


@pytest.mark.parametrize("length", [65_536, 65_537])
def test_a_list_of_python_calls_that_is_too_long_is_content(length):
    text = f"[f(a='{'x' * (length - 9)}')]"
    for pieces in ([text + "."], [text[:40_000], text[40_000:], "."]):
        parser = make(CALLS["pythonic"]).parser(TOOLS, enforced=False)
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + [*parser.finish()]
        assert isinstance(deltas[0], ToolCallDelta) == (length == 65_536)
        assert deltas[-1].text.endswith(".")


def test_a_truncated_enforced_call_is_returned_as_far_as_it_goes():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1'
    assert read("hermes", text, enforced=True) == ("", [["f", '{"a": 1']])
    assert read("hermes", text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", "Wait. <tool_c", "Wait. "),
        ("hermes", 'Wait. <tool_call>{"name": "unknown", "argu', "Wait. "),
        ("llama3_json", '{"name": "f", "param', ""),
        ("llama3_json", '{"parameters": {"a": 1}, "na', ""),
        ("llama3_json", '{"name": "Alice", "ag', '{"name": "Alice", "ag'),
        ("mistral", "[TOOL_CA", ""),
        ("mistral", '[{"name": "f", "arguments": {}}, {"na', ""),
        ("mistral", '[{"id": 1', '[{"id": 1'),
        ("pythonic", "[f(a=1, b='", ""),
        ("pythonic", "[get_x(), f", ""),
        ("pythonic", "[f() for", ""),
        ("pythonic", "[1, 2, f", "[1, 2, f"),
    ],
)
@pytest.mark.parametrize("enforced", [False, True])
def test_the_start_of_a_call_that_is_cut_off_is_left_out(name, text, content, enforced):
    parser = make(CALLS[name]).parser(TOOLS, enforced=enforced)
    deltas = [delta for piece in [*text] for delta in parser.push(piece)] + [*parser.cut_off()]
    assert "".join(delta.text for delta in deltas if not isinstance(delta, ToolCallDelta)) == content


def test_arguments_are_streamed_in_fragments_after_the_name():
    parser = make(CALLS["hermes"]).parser(TOOLS, enforced=True)
    pieces = ["<tool_", 'call>{"name": "f", "arg', 'uments": ', '{"a"', ": 1}", "}</tool_call>"]
    news = [[(delta.name, delta.arguments) for delta in parser.push(piece)] for piece in pieces]
    assert news == [[], [], [], [("f", ""), (None, '{"a"')], [(None, ": 1}")], []]


def test_references_in_a_tools_schema_are_valid_in_the_list_schema():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"const": {"$ref": "#"}}}}
    grammar = make(CALLS["mistral"]).grammar([Tool("f", parameters=schema)], ToolChoice.REQUIRED, parallel=False)
    moved = json.loads(grammar.spec.text)["$defs"]["tool0"]["properties"]
    assert moved == {"a": {"$ref": "#/$defs/tool0/$defs/A"}, "b": {"const": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "extra",
    [
        {"minimum": 1},
        {"anyOf": []},
        {"nullable": True},
        {"multipleOf": 2},
        {"items": {}},
        {"$ref": "#/$defs/A"},
        {"const": 1, "enum": [1]},
    ],
)
def test_pythonic_refuses_unenforceable_keywords_of_a_strict_tool(extra):
    schema = {"type": "object", "properties": {"a": {"type": "integer"} | extra}}
    with pytest.raises(GrammarError, match=re.escape(f"$.properties.a.{next(iter(extra))}")):
        make(CALLS["pythonic"]).grammar([Tool("f", parameters=schema, strict=True)], ToolChoice.REQUIRED, parallel=True)
    tools = [TOOLS[0], Tool("g", parameters=schema)]
    grammar = make(CALLS["pythonic"]).grammar(tools, ToolChoice.REQUIRED, parallel=True)
    assert grammar.left_out([]) == [(1, f"$.properties.a.{next(iter(extra))}")]


@pytest.mark.parametrize(
    ("schema", "literals"),
    [
        (
            {"type": ["array", "null"], "items": {"type": "integer"}},
            '(("[" ((integer) (", " (integer))*)? "]") | null)',
        ),
        ({"type": "array", "items": False}, '("[]")'),
        ({"enum": [1, "a", None, 2.5], "type": ["string", "integer"]}, """("1" | "'a'")"""),
    ],
)
def test_pythonic_literals_match_types_items_and_enumerations(schema, literals):
    tool = Tool("f", parameters={"type": "object", "properties": {"a": schema, "b": False}}, strict=True)
    grammar = make(CALLS["pythonic"]).grammar([tool], ToolChoice.REQUIRED, parallel=False)
    assert f'call0_0 ::= "a=" {literals} call0_1_more' in grammar.spec.text
    assert '"b="' not in grammar.spec.text


@pytest.mark.parametrize(
    ("prompt_end", "text", "reasoning", "content"),
    [
        ("", "<think>\nSo.\n</think>\n\nYes.", "So.", "Yes."),
        ("", "\n<think></think>Yes.", "", "Yes."),
        ("", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("assistant\n<think>\n", "So.\n</think>\n\nYes. ", "So.", "Yes. "),
        ("<think>\n", "So </thi", "So </thi", ""),
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("<think>\n", "So</think>\n\n 12", "So", " 12"),
        ("<think>\n", "So</think>\n\n\nYes", "So", "\nYes"),
        ("<think>\n", "So</think>\n\n", "So", ""),
        ("<think>\n", "So</think> Yes", "So", " Yes"),
        ("<think>\n", "So</think>\nYes", "So", "Yes"),
        ("<think>\n", "So</think>\n", "So", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(prompt_end, text, reasoning, content):
    format_ = make(REASONING["think"])
    parser = format_.parser(is_open=format_.is_open(prompt_end))
    deltas = [delta for char in text for delta in parser.push(char)] + [*parser.finish()]
    assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == reasoning
    assert "".join(d.text for d in deltas if not isinstance(d, ReasoningDelta)) == content
