"""If a chat format raises, the request fails with the name of the format."""

import pytest

from graftlm.chat.guarded_formats import GuardedReasoningFormat, GuardedToolCallFormat
from graftlm.contracts import ContentDelta, ReasoningFormat, ReasoningParser, ToolCallFormat, ToolCallParser, ToolChoice
from graftlm.errors import GrammarError, RequestFailedError
from graftlm.server.errors import error_json, status_of


class Fault:
    """Raises in one method."""

    def __init__(self, method):
        self.method = method

    def strike(self, method):
        if method == self.method:
            raise ValueError("no idea")


class CallParser(ToolCallParser):
    def __init__(self, fault):
        self.fault = fault

    def push(self, text):
        self.fault.strike("parser.push")
        return [ContentDelta(text)]

    def finish(self):
        self.fault.strike("parser.finish")
        return []

    def cut_off(self):
        self.fault.strike("parser.cut_off")
        return []


class Calls(ToolCallFormat):
    def __init__(self, fault):
        self.fault = fault

    def parser(self, tools, *, enforced):
        self.fault.strike("parser")
        return CallParser(self.fault)

    def grammar(self, tools, choice, *, parallel):
        self.fault.strike("grammar")

    def render(self, calls):
        self.fault.strike("render")
        return "calls"

    def instructions(self, tools):
        self.fault.strike("instructions")
        return "tools"

    def new_id(self):
        self.fault.strike("new_id")
        return "id"


def use_calls(format_):
    parser = format_.parser([], enforced=False)
    assert list(parser.push("a")) == [ContentDelta("a")]
    assert (list(parser.finish()), list(parser.cut_off())) == ([], [])
    assert format_.grammar([], ToolChoice.AUTO, parallel=True) is None
    assert (format_.render([]), format_.instructions([]), format_.new_id()) == ("calls", "tools", "id")


class ThoughtParser(ReasoningParser):
    def __init__(self, fault):
        self.fault = fault

    def push(self, text):
        self.fault.strike("parser.push")
        return [ContentDelta(text)]

    def finish(self):
        self.fault.strike("parser.finish")
        return []


class Thoughts(ReasoningFormat):
    end = "</t>"

    def __init__(self, fault):
        self.fault = fault

    def is_open(self, prompt_end):
        self.fault.strike("is_open")
        return True

    def parser(self, *, is_open):
        self.fault.strike("parser")
        return ThoughtParser(self.fault)


def use_thoughts(format_):
    assert (format_.end, format_.is_open("")) == ("</t>", True)
    parser = format_.parser(is_open=True)
    assert list(parser.push("a")) == [ContentDelta("a")]
    assert list(parser.finish()) == []


CALL_METHODS = [
    "parser",
    "parser.push",
    "parser.finish",
    "parser.cut_off",
    "grammar",
    "render",
    "instructions",
    "new_id",
]
THOUGHT_METHODS = ["parser", "parser.push", "parser.finish", "is_open"]


@pytest.mark.parametrize(
    ("guarded", "use"),
    [
        (GuardedToolCallFormat(Calls(Fault(None)), "x"), use_calls),
        (GuardedReasoningFormat(Thoughts(Fault(None)), "x"), use_thoughts),
    ],
)
def test_results_are_passed_on(guarded, use):
    use(guarded)


@pytest.mark.parametrize(
    ("guard", "inner", "use", "method"),
    [(GuardedToolCallFormat, Calls, use_calls, method) for method in CALL_METHODS]
    + [(GuardedReasoningFormat, Thoughts, use_thoughts, method) for method in THOUGHT_METHODS],
)
def test_an_exception_is_reported_with_format_and_method(guard, inner, use, method):
    with pytest.raises(RequestFailedError) as caught:
        use(guard(inner(Fault(method)), "the format 'odd'"))
    said = f"the format 'odd' failed in {method}: ValueError: no idea"
    assert str(caught.value) == said
    assert isinstance(caught.value.__cause__, ValueError)
    assert status_of(caught.value) == 500
    assert said.encode() in error_json(caught.value)


def test_a_grammar_error_is_passed_on_unchanged():
    class Refuses(Calls):
        def grammar(self, tools, choice, *, parallel):
            raise GrammarError("not this schema")

    with pytest.raises(GrammarError, match="not this schema"):
        GuardedToolCallFormat(Refuses(Fault(None)), "x").grammar([], ToolChoice.AUTO, parallel=True)
