"""Messages that the client has begun: only what is new is told."""

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
def test_what_is_told_is_new(begun, rest, step):
    pieces = [rest[i : i + step] for i in range(0, len(rest), step)]
    reasoning, content = texts(ContinuingParser(ThinkFormat(), begun), pieces)
    all_reasoning, all_content = texts(ThinkFormat().parser(is_open=False), [begun + rest])
    assert content == all_content
    assert reasoning in rest
    shown = begun.partition("<think>")[2] + reasoning
    # White space aside, which is left out at either end, what the client has and what it gets is all there is.
    assert "".join(all_reasoning.split()) in "".join(shown.split())
    if "</think>" not in begun + rest:
        assert "".join(shown.split()) == "".join(all_reasoning.split())
    else:
        assert shown.replace(" ", "").startswith(all_reasoning.replace(" ", ""))


@pytest.mark.parametrize("begun", ["", "It is", "<thi", "<think>a</think>", "<think>a</think>\n\nIt", "a<think>"])
def test_what_follows_an_answer_is_content(begun):
    assert not is_within_reasoning(ThinkFormat(), begun)
    reasoning, content = texts(ContinuingParser(ThinkFormat(), begun), [" so", "."])
    assert (reasoning, content) == ("", " so.")


def test_the_beginning_is_the_last_messages_text():
    assert begun_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    assert begun_text([{"role": "assistant", "content": None}]) == ""
    assert begun_text([]) == ""
