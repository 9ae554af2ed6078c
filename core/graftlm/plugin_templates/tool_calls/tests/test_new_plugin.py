"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
from graftlm.contracts import ChatFormatContext, ContentDelta, Tool, ToolCallDelta
from graftlm.testing import ToolCallFormatConformance

from graftlm_new_plugin import provide_tool_call_formats


def create():
    (provider,) = provide_tool_call_formats()
    return provider.create(provider.options(), ChatFormatContext())


class TestContract(ToolCallFormatConformance):
    def create(self, context):
        return create()


def read(text, *, enforced=False):
    parser = create().parser([Tool("f")], enforced=enforced)
    return [*parser.push(text), *parser.finish()]


CALL = ToolCallDelta(0, "f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ('<call>{"name": "f", "arguments": {"a": 1}}</call>', [CALL]),
        ('So: <call>{"name": "f", "arguments": {"a": 1}}</call> ok', [ContentDelta("So:"), CALL, ContentDelta("ok")]),
        ("<call>f(1)</call>", [ContentDelta("<call>"), ContentDelta("f(1)</call>")]),
        ('<call>{"name": "f"}</call>', [ContentDelta("<call>"), ContentDelta('{"name": "f"}</call>')]),
        ('<call>{"name": "f", "arguments": {"a": 1e999}}</call>', "content"),
        ('<call>{"name": "f", "arguments": {"a": 1', "content"),  # the call is incomplete
    ],
)
def test_a_completion_is_parted(text, deltas):
    got = read(text)
    if deltas == "content":
        assert "".join(delta.text for delta in got) == text
    else:
        assert got == deltas


def test_an_enforced_call_that_the_end_cuts_short_is_told_as_far_as_it_goes():
    assert read('<call>{"name": "f", "arguments": {"a": 1', enforced=True) == [ToolCallDelta(0, "f", '{"a": 1')]
    assert read('<call>{"name": "f", "arguments": {"a": 1}}</ca', enforced=True) == [CALL]
