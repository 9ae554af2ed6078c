"""The conformance kits of chat formats: each faulty format fails the sentence that it breaks."""

from dataclasses import replace
from typing import ClassVar

import pytest

from graftlm.contracts import ChatFormatContext, ContentDelta, ReasoningDelta, ToolCallDelta
from graftlm.testing import ReasoningFormatConformance, ToolCallFormatConformance, run_conformance
from graftlm_chat import provide_reasoning_formats, provide_tool_call_formats


def built_in(providers, name):
    (provider,) = (provider for provider in providers if provider.name == name)
    return provider.create(provider.options(), ChatFormatContext())


class Wrapper:
    """Wraps a format or parser; subclasses change one method."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Format(Wrapper):
    make_parser = Wrapper

    def parser(self, *arguments, **named):
        return self.make_parser(self.inner.parser(*arguments, **named))


# -- Tool calls


class LosesContent(Wrapper):
    def push(self, text):
        return [delta for delta in self.inner.push(text) if isinstance(delta, ToolCallDelta)]


class NumbersEveryCallZero(Wrapper):
    def push(self, text):
        return [replace(d, index=0) if isinstance(d, ToolCallDelta) else d for d in self.inner.push(text)]


class RaisesOnNul(Wrapper):
    def push(self, text):
        if "\x00" in text:
            raise ValueError("a NUL")
        return self.inner.push(text)


class ReturnsIncompleteMarkup(Wrapper):
    def cut_off(self):
        return self.inner.finish()


class MarksEachPiece(Wrapper):
    def push(self, text):
        return [ContentDelta(f"{d.text}|") if isinstance(d, ContentDelta) else d for d in self.inner.push(text)]


class RendersLists(Format):
    def render(self, calls):
        return str([call.name for call in calls])


class EnforcesNothing(Format):
    def grammar(self, tools, choice, *, parallel):
        return None


class IgnoresStrict(Format):
    def grammar(self, tools, choice, *, parallel):
        grammar = self.inner.grammar(tools, choice, parallel=parallel)
        return replace(grammar, spec=replace(grammar.spec, strict=False))


class OmitsTools(Format):
    def instructions(self, tools):
        return "You may call functions."


class RepeatsIds(Format):
    def new_id(self):
        return "call_1"


def with_parser(kind):
    return type(kind.__name__, (Format,), {"make_parser": kind})


READ = "A parser returns the calls that `render` has written."
PIECES = "Content and calls do not depend on how the text is cut into pieces; no text raises."


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Format, None),
        (RendersLists, READ),
        (with_parser(NumbersEveryCallZero), READ),
        (with_parser(RaisesOnNul), PIECES),
        (with_parser(MarksEachPiece), PIECES),
        (with_parser(LosesContent), "Text without a call is returned unchanged as content."),
        (
            with_parser(ReturnsIncompleteMarkup),
            "`cut_off` drops text that may be the start of a call, including its markup.",
        ),
        (EnforcesNothing, "`grammar` returns a specification for `REQUIRED`; it is strict if all tools are strict."),
        (IgnoresStrict, "`grammar` returns a specification for `REQUIRED`; it is strict if all tools are strict."),
        (OmitsTools, "`instructions` contains the name and the description of each tool."),
        (RepeatsIds, "`new_id` returns a different id for each call."),
    ],
)
def test_a_faulty_tool_call_format_is_found(broken, sentence):
    class Kit(ToolCallFormatConformance):
        parameters: ClassVar = {"enforced": (False,), "seed": (0, 1)}

        def create(self, context):
            return broken(built_in(provide_tool_call_formats(), "hermes"))

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences


# -- Reasoning


class TreatsContentAsReasoning(Wrapper):
    def push(self, text):
        return [ReasoningDelta(delta.text) for delta in self.inner.push(text)]

    def finish(self):
        return [ReasoningDelta(delta.text) for delta in self.inner.finish()]


class OmitsTheEnd(Wrapper):
    def finish(self):
        return []


class HasAnotherEnd(Format):
    end = "</thinking>"


class IsAlwaysOpen(Format):
    def is_open(self, prompt_end):
        return True


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Format, None),
        (with_parser(TreatsContentAsReasoning), "An answer without reasoning is content."),
        (
            with_parser(MarksEachPiece),
            "Reasoning and content do not depend on how the text is cut into pieces; no text raises.",
        ),
        (
            with_parser(RaisesOnNul),
            "Reasoning and content do not depend on how the text is cut into pieces; no text raises.",
        ),
        (HasAnotherEnd, "The text `end` ends the reasoning."),
        (
            IsAlwaysOpen,
            "`is_open` is false for a prompt that does not open a reasoning, or that ends after the reasoning's end.",
        ),
    ],
)
def test_a_faulty_reasoning_format_is_found(broken, sentence):
    class Kit(ReasoningFormatConformance):
        parameters: ClassVar = {"is_open": (False, True), "seed": (0, 1)}

        def create(self, context):
            return broken(built_in(provide_reasoning_formats(), "think"))

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences
