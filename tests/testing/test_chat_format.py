"""The conformance kits of chat formats: what is broken on purpose is found by the sentence it breaks."""

from dataclasses import replace
from typing import ClassVar

import pytest

from graftlm.contracts import ChatFormatContext, ContentDelta, ReasoningDelta, ToolCallDelta
from graftlm.testing import ReasoningFormatConformance, ToolCallFormatConformance, run_conformance
from graftlm_chat import provide_reasoning_formats, provide_tool_call_formats


def built_in(providers, name):
    (provider,) = (provider for provider in providers if provider.name == name)
    return provider.create(provider.options(), ChatFormatContext())


class Around:
    """A format or parser around another, which a test breaks in one method."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Format(Around):
    make_parser = Around

    def parser(self, *arguments, **named):
        return self.make_parser(self.inner.parser(*arguments, **named))


# -- Tool calls


class LosesContent(Around):
    def push(self, text):
        return [delta for delta in self.inner.push(text) if isinstance(delta, ToolCallDelta)]


class CountsEveryCallAsTheFirst(Around):
    def push(self, text):
        return [replace(d, index=0) if isinstance(d, ToolCallDelta) else d for d in self.inner.push(text)]


class RaisesAtAnOddText(Around):
    def push(self, text):
        if "\x00" in text:
            raise ValueError("a NUL")
        return self.inner.push(text)


class ShowsWhatIsCutOff(Around):
    def cut_off(self):
        return self.inner.finish()


class NoticesPieces(Around):
    def push(self, text):
        return [ContentDelta(f"{d.text}|") if isinstance(d, ContentDelta) else d for d in self.inner.push(text)]


class RendersLists(Format):
    def render(self, calls):
        return str([call.name for call in calls])


class EnforcesNothing(Format):
    def grammar(self, tools, choice, *, parallel):
        return None


class TakesStrictLightly(Format):
    def grammar(self, tools, choice, *, parallel):
        grammar = self.inner.grammar(tools, choice, parallel=parallel)
        return replace(grammar, spec=replace(grammar.spec, strict=False))


class KeepsToolsToItself(Format):
    def instructions(self, tools):
        return "You may call functions."


class RepeatsIds(Format):
    def new_id(self):
        return "call_1"


def with_parser(kind):
    return type(kind.__name__, (Format,), {"make_parser": kind})


READ = "What `render` writes, a parser reads as the same calls."
PIECES = "How the text is cut into pieces changes neither the content nor the calls; no text raises."


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Format, None),
        (RendersLists, READ),
        (with_parser(CountsEveryCallAsTheFirst), READ),
        (with_parser(RaisesAtAnOddText), PIECES),
        (with_parser(NoticesPieces), PIECES),
        (with_parser(LosesContent), "Text without a call comes back unchanged."),
        (
            with_parser(ShowsWhatIsCutOff),
            "`cut_off` leaves out what may be the beginning of a call, be it of its markup.",
        ),
        (EnforcesNothing, "`grammar` returns a specification for `REQUIRED`, strict when all tools are."),
        (TakesStrictLightly, "`grammar` returns a specification for `REQUIRED`, strict when all tools are."),
        (KeepsToolsToItself, "`instructions` tells a model of its tools."),
        (RepeatsIds, "`new_id` draws the id of a call."),
    ],
)
def test_a_broken_tool_call_format_is_found(broken, sentence):
    class Kit(ToolCallFormatConformance):
        parameters: ClassVar = {"enforced": (False,), "seed": (0, 1)}

        def create(self, context):
            return broken(built_in(provide_tool_call_formats(), "hermes"))

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences


# -- Reasoning


class ThinksAlways(Around):
    def push(self, text):
        return [ReasoningDelta(delta.text) for delta in self.inner.push(text)]

    def finish(self):
        return [ReasoningDelta(delta.text) for delta in self.inner.finish()]


class ForgetsTheEnd(Around):
    def finish(self):
        return []


class EndsOtherwise(Format):
    end = "</thinking>"


class OpensAlways(Format):
    def is_open(self, prompt_end):
        return True


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Format, None),
        (with_parser(ThinksAlways), "What is no reasoning is content."),
        (
            with_parser(NoticesPieces),
            "How the text is cut into pieces changes neither reasoning nor content; no text raises.",
        ),
        (
            with_parser(RaisesAtAnOddText),
            "How the text is cut into pieces changes neither reasoning nor content; no text raises.",
        ),
        (EndsOtherwise, "`end` is what ends the reasoning."),
        (OpensAlways, "A prompt that ends otherwise, or after the reasoning's end, leaves nothing open."),
    ],
)
def test_a_broken_reasoning_format_is_found(broken, sentence):
    class Kit(ReasoningFormatConformance):
        parameters: ClassVar = {"is_open": (False, True), "seed": (0, 1)}

        def create(self, context):
            return broken(built_in(provide_reasoning_formats(), "think"))

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences
