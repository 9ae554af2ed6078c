"""The plan for answering a chat request: the prompt, the grammar of the answer, and the parsers of its text."""

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

#: Number of tokens at the prompt's end that show whether the chat template has opened the reasoning.
NUM_LAST_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The plan for answering a chat request.

    Attributes:
        messages: the prompt, which the chat template renders.
        params: the sampling parameters.
        template_args: variables of the chat template.
        use: the tools that may be called; None if the answer cannot call tools.
        calls: the grammar that enforces the format of calls; None if the format is not enforced.
        reasoning: the format of the reasoning. If None, the reasoning remains in the content.
        field: name of the request's field with the grammar; None if there is no grammar.
        begun: the text of the message that the answer continues; "" if it begins a new message. Set by `settled`.
        is_open: whether the prompt opens the reasoning, so that the answer begins with reasoning. Set by `settled`.
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
        """Return a reader for one completion."""
        parser: ReasoningParser | None = None
        if self.reasoning is not None and self.begun:
            parser = ContinuingParser(self.reasoning, self.begun)
        elif self.reasoning is not None:
            parser = self.reasoning.parser(is_open=self.is_open)
        return MessageReader(self.use, enforced=self.calls is not None, reasoning=parser)

    def unenforced(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Return the parts of the request's schemas that are not enforced, as paths in the request.

        Args:
            paths: the parts of the grammar in `params` that a grammar backend does not enforce.

        Raises:
            ApiError: 400, a part belongs to a strict tool.
        """
        return tuple(paths) if self.use is None or self.calls is None else self.use.unenforced(self.calls, paths)


async def plan_answer(body: ChatRequest, manager: TokenizerManager) -> AnswerPlan:
    """Return the plan for a request. `settled` adds the parts that depend on the prompt's tokens.

    Raises:
        RequestError: fields contradict each other, or request an unsupported feature.
    """
    use = tool_use(body, manager.chat_formats)
    messages, variables = for_template(chat_messages(body.messages), body, manager.chat_formats)
    arguments = template_args(body) | variables
    enforced = use is not None and await check_tools(use, body, manager)
    calls = use.grammar() if use is not None and enforced else None
    params = chat_params(body, None if use is None else _grammar_params(calls))
    reasoning = manager.chat_formats.reasoning if body.separate_reasoning is not False else None
    field = grammar_field(body) if calls is None else "tools"
    return AnswerPlan(messages, params, arguments, use, calls, reasoning, field)


def _grammar_params(calls: CallGrammar | None) -> dict[str, Any]:
    """Return the sampling parameters that enforce the format of calls; {} if the format is not enforced."""
    return {} if calls is None else {calls.spec.kind.value: calls.spec.text, "strict": calls.spec.strict}


def settled(plan: AnswerPlan, prompt_end: str, is_token: Callable[[str], bool]) -> AnswerPlan:
    """Return a plan with the parts that depend on the prompt's end.

    These parts are whether the prompt opens the reasoning, and where the grammar begins.

    Args:
        prompt_end: the text of the prompt's last tokens, including special tokens.
        is_token: returns whether a text is one token of the model.
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
    """Return whether a grammar permits free text before its constrained parts.

    Returns True for a malformed grammar, which is refused later.
    """
    tag = params.structural_tag
    try:
        value = json.loads(tag) if isinstance(tag, str) else tag
    except (ValueError, RecursionError):
        return True
    return isinstance(value, Mapping) and not value.get("at_least_one")
