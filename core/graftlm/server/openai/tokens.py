"""The routes /v1/tokenize and /v1/detokenize."""

from fastapi import APIRouter, Response

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ApiError
from graftlm.server.openai.answers import PromptText, TokenList, TokenText, encode
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model
from graftlm.server.openai.requests import DetokenizeRequest, TokenizeRequest
from graftlm.server.openai.started_chat import chat_tokens

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module."""
    router = APIRouter()

    @router.post("/tokenize", include_in_schema=False)
    @router.post("/v1/tokenize", summary="Convert texts or a chat to token ids", responses=described(TokenList))
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model, manager.model, manager.adapters)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = [await chat_tokens(manager, body.chat())]
        else:
            texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
            adds = body.add_special_tokens is not False
            tokens = [await manager.preparer.encode(text, add_special_tokens=adds) for text in texts]
        lists, counts, context_len = [ids.tolist() for ids in tokens], [*map(len, tokens)], manager.model.context_len
        many = isinstance(body.prompt, list)
        answer = TokenList(lists, counts, context_len) if many else TokenList(lists[0], counts[0], context_len)
        return Response(encode(answer), media_type="application/json")

    @router.post("/v1/detokenize", summary="Convert token ids to text", responses=described(TokenText))
    async def detokenize(body: DetokenizeRequest) -> Response:
        text = await _text_of(manager, body)
        return Response(encode(TokenText(text)), media_type="application/json")

    @router.post(
        "/detokenize", summary="Same as /v1/detokenize, with vLLM's field `prompt`", responses=described(PromptText)
    )
    async def detokenize_prompt(body: DetokenizeRequest) -> Response:
        text = await _text_of(manager, body)
        return Response(encode(PromptText(text, text)), media_type="application/json")

    return router


async def _text_of(manager: TokenizerManager, body: DetokenizeRequest) -> str:
    check_model(body.model, manager.model, manager.adapters)
    skips = body.skip_special_tokens is not False
    return await manager.preparer.decode(body.tokens, skip_special_tokens=skips)
