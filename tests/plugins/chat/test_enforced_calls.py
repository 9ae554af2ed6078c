"""Text that the grammars of the formats allow is parsed as calls that match the schemas."""

import json

import pytest

import graftlm_chat
from graftlm import Engine, SamplingParams
from graftlm.contracts import ChatFormatContext, NoOptions, Tool, ToolCallDelta, ToolChoice

ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [Tool("add", "Adds.", ADD, strict=True), Tool("get-time", "Tells the time.")]
FORMATS = {provider.name: provider for provider in graftlm_chat.provide_tool_call_formats()}


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 8192}) as it:
        yield it


# this format refuses references in strict tools
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"pythonic"}))
def test_a_parameter_may_have_the_name_of_a_keyword(engine, name):
    number = {"$defs": {"n": {"enum": [7]}}, "properties": {"default": {"$ref": "#/$defs/n"}}, "required": ["default"]}
    schema = {"type": "object", "additionalProperties": False} | number
    tools = [Tool("one", "", schema, strict=True), Tool("two", "", schema, strict=True)]
    format_ = FORMATS[name].create(NoOptions(), ChatFormatContext())
    spec = format_.grammar(tools, ToolChoice.REQUIRED, parallel=False).spec
    (output,) = engine.generate("Call:", SamplingParams(temperature=0, max_tokens=80, **{spec.kind.value: spec.text}))
    parser = format_.parser(tools, enforced=True)
    calls = [d for d in [*parser.push(output.text), *parser.finish()] if isinstance(d, ToolCallDelta)]
    assert json.loads("".join(d.arguments for d in calls)) == {"default": 7}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_required_call_matches_its_schema(engine, name, parallel):
    format_ = FORMATS[name].create(NoOptions(), ChatFormatContext())
    spec = format_.grammar(TOOLS[:1], ToolChoice.REQUIRED, parallel=parallel).spec
    params = SamplingParams(temperature=0, max_tokens=80, **{spec.kind.value: spec.text}, strict=spec.strict)
    (output,) = engine.generate("Call:", params)
    parser = format_.parser(TOOLS, enforced=True)
    calls = [d for d in [*parser.push(output.text), *parser.finish()] if isinstance(d, ToolCallDelta)]
    assert calls[0].name == "add", output.text
    assert json.loads("".join(d.arguments for d in calls if d.index == 0)) in ({"a": 1}, {"a": 2})
    assert parallel or (len({d.index for d in calls}) == 1 and output.finish_reason == "stop")
