"""How a chat request is answered: the prompt, what holds the answer, and how its text is read."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftlm.contracts import CallGrammar, ReasoningFormat, ToolChoice
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt
from graftlm.server.errors import ApiError
from graftlm.server.openai.message_reader import MessageReader
from graftlm.server.openai.params import chat_messages, chat_params, grammar_field, template_args
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.tools import ToolUse, check_tools, for_template, tool_use
from graftlm.types import SamplingParams

__all__ = ["AnswerPlan", "plan_answer"]

#: At the prompt's end, among which a template opens the reasoning.
_NUM_LAST_TOKENS = 16
#: What free text follows; a structural tag is another matter.
_WHOLE_OUTPUT = ("json_schema", "regex", "ebnf", "choice")


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
        is_open: whether the answer begins within the reasoning.
    """

    prompt: Prompt
    params: SamplingParams
    template_args: dict[str, Any]
    use: ToolUse | None
    calls: CallGrammar | None
    reasoning: ReasoningFormat | None
    field: str | None
    is_open: bool

    def reader(self) -> MessageReader:
        """Return a reader of one completion."""
        reasoning = None if self.reasoning is None else self.reasoning.parser(is_open=self.is_open)
        return MessageReader(self.use, enforced=self.calls is not None, reasoning=reasoning)

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
    plan = AnswerPlan(messages, params, arguments, use, calls, reasoning, field, is_open=False)
    return plan if reasoning is None else await _with_reasoning(plan, reasoning, messages, manager)


def _held_to(calls: CallGrammar | None) -> dict[str, Any]:
    """Return the sampling parameters that hold an answer to the format of calls; none where it is not held."""
    return {} if calls is None else {calls.spec.kind.value: calls.spec.text, "strict": calls.spec.strict}


async def _with_reasoning(
    plan: AnswerPlan, reasoning: ReasoningFormat, messages: Sequence[Any], manager: TokenizerManager
) -> AnswerPlan:
    """Look whether the prompt opens the reasoning, and have the grammar wait for its end.

    Raises:
        ApiError: the grammar cannot wait.
    """
    token_ids = await manager.encode_chat(messages, **plan.template_args)
    prompt_end = await manager.decode(token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
    plan = replace(plan, prompt=token_ids, is_open=reasoning.is_open(prompt_end))
    required = plan.use is not None and plan.use.choice is ToolChoice.REQUIRED
    at_once = required or _begins_with_structure(plan.params.structural_tag)
    if not at_once and all(getattr(plan.params, name) is None for name in _WHOLE_OUTPUT):
        return plan
    if not plan.is_open or at_once:
        return replace(plan, reasoning=None)  # the grammar leaves no room for it
    return replace(plan, params=_after_reasoning(plan.params, reasoning.end))


def _begins_with_structure(tag: Any) -> bool:
    """Whether a structural tag leaves no free text before its first structure; a malformed one is refused later."""
    try:
        value = json.loads(tag) if isinstance(tag, str) else tag
    except (ValueError, RecursionError):
        return False
    return isinstance(value, Mapping) and bool(value.get("at_least_one"))


def _after_reasoning(params: SamplingParams, end: str) -> SamplingParams:
    """Have a schema, regular expression or choice hold what follows the reasoning.

    Raises:
        ApiError: an EBNF cannot be a part of an output.
    """
    structure = {"begin": f"{end}\n\n", **_held(params), "end": ""}
    tag = {"triggers": [end], "structures": [structure], "at_least_one": False, "stop_after_first": True}
    return replace(params, json_schema=None, regex=None, choice=None, structural_tag=tag)


def _held(params: SamplingParams) -> dict[str, Any]:
    """Return a grammar as a structure's `schema` or `regex`."""
    if params.ebnf is not None:
        message = (
            "ebnf: the prompt opens the model's reasoning, and only json_schema, regex and choice can wait for its "
            "end. Say it in one of these, or set separate_reasoning: false to have the grammar hold the whole output."
        )
        raise ApiError(400, message, param="ebnf", code="unsupported")
    if params.regex is not None:
        return {"regex": params.regex}
    if params.choice is not None:
        return {"regex": "|".join(map(re.escape, params.choice))}
    schema = params.json_schema
    try:
        return {"schema": json.loads(schema) if isinstance(schema, str) else schema}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"json_schema: not JSON: {error}", param="json_schema") from None
