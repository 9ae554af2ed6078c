"""How a chat request is answered: the prompt, what holds the answer, and how its text is read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from graftlm.contracts import CallGrammar, ReasoningFormat, ReasoningParser
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.openai.begun_message import ContinuingParser, begun_text, is_within_reasoning
from graftlm.server.openai.message_reader import MessageReader
from graftlm.server.openai.params import chat_messages, chat_params, grammar_field, template_args
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.tools import ToolUse, check_tools, for_template, tool_use
from graftlm.types import Message, SamplingParams

__all__ = ["NUM_LAST_TOKENS", "AnswerPlan", "plan_answer", "settled"]

#: Tokens at the prompt's end that show whether the chat template has opened the reasoning.
NUM_LAST_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How a chat is answered.

    Attributes:
        messages: the prompt, which the chat template renders.
        template_args: variables of the chat template.
        use: the tools that may be called; None: none.
        calls: the grammar that holds calls to their format; None: none does.
        reasoning: None leaves reasoning in the content.
        field: that the grammar comes from, None if there is none.
        begun: the text of the message that the answer continues, "" for an answer of its own; as `settled` finds it.
        is_open: whether the prompt opens the reasoning; as `settled` finds it.
    """

    messages: Sequence[Message]
    params: SamplingParams
    template_args: dict[str, Any]
    use: ToolUse | None
    calls: CallGrammar | None
    reasoning: ReasoningFormat | None
    field: str | None
    begun: str = ""
    is_open: bool = False

    def reader(self) -> MessageReader:
        """Return a reader of one completion."""
        parser: ReasoningParser | None = None
        if self.reasoning is not None and self.begun:
            parser = ContinuingParser(self.reasoning, self.begun)
        elif self.reasoning is not None:
            parser = self.reasoning.parser(is_open=self.is_open)
        return MessageReader(self.use, enforced=self.calls is not None, reasoning=parser)

    def unenforced(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Return what of the request's schemas is not enforced, by its place in the request.

        Args:
            paths: what a backend named of the grammar in `params`.

        Raises:
            ApiError: it is a strict tool's.
        """
        return tuple(paths) if self.use is None or self.calls is None else self.use.unenforced(self.calls, paths)


async def plan_answer(body: ChatRequest, manager: TokenizerManager) -> AnswerPlan:
    """Decide how a request is answered, as far as that does not depend on the prompt's tokens; see `settled`.

    Raises:
        RequestError: fields contradict each other, or ask for what cannot be done.
    """
    use = tool_use(body, manager.chat_formats)
    messages, variables = for_template(chat_messages(body.messages), body, manager.chat_formats)
    arguments = template_args(body) | variables
    enforced = use is not None and await check_tools(use, body, manager)
    calls = use.grammar() if use is not None and enforced else None
    params = chat_params(body, None if use is None else _held_to(calls))
    reasoning = manager.chat_formats.reasoning if body.separate_reasoning is not False else None
    field = grammar_field(body) if calls is None else "tools"
    return AnswerPlan(messages, params, arguments, use, calls, reasoning, field)


def _held_to(calls: CallGrammar | None) -> dict[str, Any]:
    """Return the sampling parameters that hold an answer to the format of calls; none where it is not held."""
    return {} if calls is None else {calls.spec.kind.value: calls.spec.text, "strict": calls.spec.strict}


def settled(plan: AnswerPlan, prompt_end: str, is_token: Callable[[str], bool]) -> AnswerPlan:
    """Return a plan for a prompt that ends so: whether reasoning is open, and where the grammar begins.

    Args:
        prompt_end: the text of the prompt's last tokens, special ones included.
        is_token: whether a text is one token of the model.
    """
    reasoning = plan.reasoning
    if reasoning is None:
        return plan
    begun = begun_text(plan.messages) if plan.template_args.get("continue_final_message") else ""
    is_open = not begun and reasoning.is_open(prompt_end)
    plan = replace(plan, begun=begun, is_open=is_open)
    if plan.params.grammar_field is None:
        return plan
    if is_open or is_within_reasoning(reasoning, begun):
        return replace(plan, params=replace(plan.params, reasoning_end=reasoning.end))
    if not begun and not prompt_end.rstrip().endswith(reasoning.end or "\0") and is_token(reasoning.begin):
        params = replace(plan.params, reasoning_begin=reasoning.begin, reasoning_end=reasoning.end)
        return replace(plan, params=params)
    return plan if _has_free_text(plan.params) else replace(plan, reasoning=None)


def _has_free_text(params: SamplingParams) -> bool:
    """Whether a grammar leaves room for text before what it holds; a malformed one is refused later."""
    tag = params.structural_tag
    try:
        value = json.loads(tag) if isinstance(tag, str) else tag
    except (ValueError, RecursionError):
        return True
    return isinstance(value, Mapping) and not value.get("at_least_one")
