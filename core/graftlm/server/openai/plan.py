"""How a chat request is answered: the prompt, what holds the answer, and how its text is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftlm.contracts import CallGrammar, ReasoningFormat, ReasoningParser
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt
from graftlm.server.openai.begun_message import ContinuingParser, begun_text, is_within_reasoning
from graftlm.server.openai.message_reader import MessageReader
from graftlm.server.openai.params import chat_messages, chat_params, grammar_field, template_args
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.tools import ToolUse, check_tools, for_template, tool_use
from graftlm.types import SamplingParams

__all__ = ["AnswerPlan", "plan_answer"]

#: At the prompt's end, among which a template opens the reasoning.
_NUM_LAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How a chat is answered.

    Attributes:
        prompt: messages, or the token ids that they were turned into.
        template_args: variables of the chat template.
        use: the tools that may be called; None: none.
        calls: the grammar that holds calls to their format; None: none does.
        reasoning: None leaves reasoning in the content.
        field: that the grammar comes from, None if there is none.
        begun: the text of the message that the answer continues, "" for an answer of its own.
        is_open: whether the prompt opens the reasoning.
    """

    prompt: Prompt
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
    """Decide how a request is answered.

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
    plan = AnswerPlan(messages, params, arguments, use, calls, reasoning, field)
    return plan if reasoning is None else await _with_reasoning(plan, reasoning, messages, manager)


def _held_to(calls: CallGrammar | None) -> dict[str, Any]:
    """Return the sampling parameters that hold an answer to the format of calls; none where it is not held."""
    return {} if calls is None else {calls.spec.kind.value: calls.spec.text, "strict": calls.spec.strict}


async def _with_reasoning(
    plan: AnswerPlan, reasoning: ReasoningFormat, messages: Sequence[Any], manager: TokenizerManager
) -> AnswerPlan:
    """Look whether the answer begins within the reasoning, and have the grammar wait for its end."""
    token_ids = await manager.encode_chat(messages, **plan.template_args)
    prompt_end = await manager.decode(token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
    begun = begun_text(messages) if plan.template_args.get("continue_final_message") else ""
    is_open = not begun and reasoning.is_open(prompt_end)
    plan = replace(plan, prompt=token_ids, begun=begun, is_open=is_open)
    if plan.params.grammar_field is None:
        return plan
    if is_open or is_within_reasoning(reasoning, begun):
        return replace(plan, params=replace(plan.params, reasoning_end=reasoning.end))
    if not begun and not prompt_end.rstrip().endswith(reasoning.end or "\0") and manager.is_token(reasoning.begin):
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
