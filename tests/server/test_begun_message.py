"""Messages that the client has begun: the answer contains only the new part."""

import itertools

import pytest

from graftlm.contracts import ReasoningDelta
from graftlm.server.openai.begun_message import ContinuingParser, begun_text, is_within_reasoning
from graftlm_chat.think import ThinkFormat

BEGUN = [
    "<think>abc",
    "<think>abc ",
    "<think>abc </thi",
    "<think>t</t",
    "<think>",
    "<think> \n",
    "<think> <",
    "\n<think>a</",
]
REST = ["x", " x", "<x", "</x", "nk>4", "ink>\n\n4", "</think>4", "</think>\n\n4", "hink", "\n", "i", ">i", "think>i"]


def texts(parser, pieces):
    reasoning = content = ""
    for delta in [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]:
        if isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        else:
            content += delta.text
    return reasoning, content


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("step", [1, 100])
def test_the_answer_contains_only_new_text(begun, rest, step):
    pieces = [rest[i : i + step] for i in range(0, len(rest), step)]
    reasoning, content = texts(ContinuingParser(ThinkFormat(), begun), pieces)
    all_reasoning, all_content = texts(ThinkFormat().parser(is_open=False), [begun + rest])
    assert content == all_content
    assert reasoning in rest
    shown = begun.partition("<think>")[2] + reasoning
    # Ignoring white space, which is stripped at both ends, the client's text and the answer together are the whole
    # message.
    assert "".join(all_reasoning.split()) in "".join(shown.split())
    if "</think>" not in begun + rest:
        assert "".join(shown.split()) == "".join(all_reasoning.split())
    else:
        assert shown.replace(" ", "").startswith(all_reasoning.replace(" ", ""))


@pytest.mark.parametrize("begun", ["", "It is", "<thi", "<think>a</think>", "<think>a</think>\n\nIt", "a<think>"])
def test_text_after_a_begun_answer_is_content(begun):
    assert not is_within_reasoning(ThinkFormat(), begun)
    reasoning, content = texts(ContinuingParser(ThinkFormat(), begun), [" so", "."])
    assert (reasoning, content) == ("", " so.")


def test_the_begun_text_is_the_text_of_the_last_assistant_message():
    assert begun_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    assert begun_text([{"role": "assistant", "content": None}]) == ""
    assert begun_text([]) == ""
