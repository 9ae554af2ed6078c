"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
from graftlm.contracts import ChatFormatContext, ContentDelta, ReasoningDelta
from graftlm.testing import ReasoningFormatConformance

from graftlm_new_plugin import provide_reasoning_formats


def create():
    (provider,) = provide_reasoning_formats()
    return provider.create(provider.options(), ChatFormatContext())


class TestContract(ReasoningFormatConformance):
    def create(self, context):
        return create()


@pytest.mark.parametrize(
    ("pieces", "is_open", "reasoning", "content"),
    [
        (["<reason", "ing>So</reas", "oning>4"], False, "So", "4"),
        (["So</reasoning>4"], True, "So", "4"),  # the first tag is at the end of the prompt
        (["4 <reasoning>"], False, "", "4 <reasoning>"),  # a tag that is not at the beginning is content
        (["<reason"], False, "", "<reason"),
        (["<reasoning>So </reas"], False, "So </reas", ""),  # cut off within the reasoning
    ],
)
def test_a_completion_is_parted(pieces, is_open, reasoning, content):
    parser = create().parser(is_open=is_open)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == reasoning
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == content


@pytest.mark.parametrize(("prompt_end", "is_open"), [("<reasoning>\n", True), ("</reasoning>", False), ("", False)])
def test_a_prompt_may_open_the_reasoning(prompt_end, is_open):
    assert create().is_open(prompt_end) is is_open
