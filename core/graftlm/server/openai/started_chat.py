"""A chat that has been checked and queued, with the readers of its answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import CompletionDelta, Generation
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.cache_namespace import namespace_of
from graftlm.server.errors import grammar_of
from graftlm.server.openai.message_reader import MessageReader
from graftlm.server.openai.params import request_adapter
from graftlm.server.openai.plan import NUM_LAST_TOKENS, plan_answer, settled
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.output_room import check_output_room
from graftlm.types import SamplingParams, TokenIds

__all__ = ["StartedChat", "chat_tokens", "count_prompt_tokens", "start_chat"]


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A running chat. The routes for chat completions, responses and messages all use this class to generate.

    Attributes:
        model: name of the model in the answer, including the adapter.
        generation: the running generation.
        readers: one reader per completion.
        unenforced: paths of JSON schema keywords that are not enforced.
        grammar_field: name of the request's field with the grammar; None if there is no grammar.
    """

    model: str
    generation: Generation
    readers: Sequence[MessageReader]
    unenforced: Sequence[str]
    grammar_field: str | None

    async def ended(self) -> GatheredOutput:
        """Wait for the end and return the output. A cancellation aborts the request.

        Raises:
            GraftlmError: the request failed.
        """
        try:
            with grammar_of(self.grammar_field):
                return await self.generation.ended()
        finally:
            self.generation.abort()

    async def deltas(self) -> AsyncGenerator[list[CompletionDelta], None]:
        """Yield the new deltas as they arrive. Closing the generator early aborts the request.

        Raises:
            GraftlmError: the request failed.
        """
        try:
            with grammar_of(self.grammar_field):
                async for deltas in self.generation:
                    yield deltas
        finally:
            self.generation.abort()


async def start_chat(
    manager: TokenizerManager, body: ChatRequest, request_id: str, *, clips: bool = False
) -> StartedChat:
    """Check a chat request and queue it.

    Args:
        clips: whether to reduce an output limit that exceeds the context, even without `server.clip_max_tokens`.

    Raises:
        GraftlmError: the request is invalid, or no replica accepts it.
    """
    adapter = request_adapter(body, manager.model, manager.adapters)
    plan = await plan_answer(body, manager)

    def adapt(token_ids: TokenIds) -> SamplingParams:
        nonlocal plan
        prompt_end = manager.tokenizer.decode(token_ids[-NUM_LAST_TOKENS:], skip_special_tokens=False)
        plan = settled(plan, prompt_end, manager.preparer.is_token)
        return plan.params

    options = RequestOptions(
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
        cache_salt=namespace_of(body.cache_salt, body.extra_key),
        adapter=adapter,
        routing_key=body.prompt_cache_key,
    )
    grammar_field = plan.field
    with grammar_of(grammar_field):
        prepared = await manager.prepare(
            plan.messages,
            plan.params,
            options,
            request_id=request_id,
            template_args=plan.template_args,
            adapt=adapt,
            keep_last=body.truncate_prompt_tokens,
        )
    if not clips:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        check_output_room(manager, len(prepared.prompt_token_ids), prepared.params.max_tokens, field)
    unenforced = plan.unenforced(prepared.unenforced)
    readers = [plan.reader() for _ in range(prepared.params.n)]
    generation = await manager.start(prepared)
    return StartedChat(manager.model.id_with(adapter), generation, readers, unenforced, grammar_field)


async def count_prompt_tokens(manager: TokenizerManager, body: ChatRequest) -> int:
    """Return the number of prompt tokens of a chat request.

    Raises:
        RequestError: the request is invalid.
    """
    request_adapter(body, manager.model, manager.adapters)
    return len(await chat_tokens(manager, body))


async def chat_tokens(manager: TokenizerManager, body: ChatRequest) -> TokenIds:
    """Return the prompt tokens of a chat request, int32 [n].

    Raises:
        RequestError: the request is invalid.
    """
    plan = await plan_answer(body, manager)
    return await manager.preparer.encode_chat(plan.messages, **plan.template_args)
