"""Tokenization and checks of requests in threads, outside the event loop that serves HTTP."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from graftlm.errors import GrammarError, InvalidPromptError, UnavailableError, UnsupportedFeatureError
from graftlm.intake import Intake, draw_seed
from graftlm.media import MediaTokens
from graftlm.processes.check_threads import CheckThreads
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.prompt_encoder import PromptEncoder
from graftlm.prompts import Prompt, TextPair, is_with_pictures
from graftlm.request_options import RequestOptions
from graftlm.types import Message, SamplingParams, TokenIds

__all__ = ["RequestPreparer"]

T = TypeVar("T")

_GRAMMAR_CHECK_TIMEOUT_S: Final = 60.0


class RequestPreparer:
    """Calls the tokenizer and the intake in threads. All methods are called in one event loop.

    Grammars are checked in separate threads, because a check may take seconds or never return.

    Args:
        encoder: tokenizes prompts.
        intake: checks prompts and parameters.
    """

    def __init__(self, encoder: PromptEncoder, intake: Intake) -> None:
        self._encoder = encoder
        self._intake = intake
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="graftlm-tokenizer")
        self._media_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="graftlm-media")
        self._grammar_threads = CheckThreads(num_threads=2, timeout_s=_GRAMMAR_CHECK_TIMEOUT_S)
        self._is_closed = False

    async def prepare(
        self,
        prompt: Prompt | TextPair,
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        adapt: Callable[[TokenIds], SamplingParams] | None = None,
        keep_last: int | None = None,
    ) -> PreparedRequest:
        """Tokenize and check a prompt in a thread.

        Args:
            prompt: text, a pair of texts, token ids, or chat messages, which the checkpoint's chat template renders.
            params: the sampling parameters. If `adapt` is given, they only determine whether the request has a grammar.
            options: options other than sampling parameters.
            request_id: the client's id; None to create a random one.
            template_args: further variables of the chat template.
            adapt: function from the prompt's token ids to the sampling parameters, called in the thread. The result
                must have a grammar if and only if `params` has one.
            keep_last: number of the prompt's last tokens to keep; -1 for the length of the context, None for all.

        Raises:
            RequestError: the prompt or its parameters are not valid.
            UnavailableError: the server is stopping, or checks of other grammars hang.
        """

        def check() -> PreparedRequest:
            pooling, intake = options.pooling, self._intake
            encoded = self._encoder.encode(prompt, template_args or {})
            media = encoded if isinstance(encoded, MediaTokens) else None
            if media is not None:
                if keep_last is not None:
                    raise InvalidPromptError("a prompt with pictures cannot be truncated")
                intake.check_prompt(media.token_ids, pooling=pooling, media=media.media)
                encoded = media.media.shown(media.token_ids)
            if keep_last is not None:
                most = intake.limits.context_len - (1 if pooling is None else 0)
                encoded = encoded[-(most if keep_last == -1 else keep_last) :]
            token_ids = intake.check_prompt(encoded, pooling=pooling)
            checked, unenforced = intake.check_params(params if adapt is None else adapt(token_ids))
            intake.check_room(len(token_ids), checked, pooling=pooling)
            return PreparedRequest(
                request_id=uuid.uuid4().hex if request_id is None else request_id,
                prompt_token_ids=token_ids,
                params=checked,
                seed=draw_seed() if checked.seed is None else checked.seed,
                options=options,
                unenforced=unenforced,
                media=media,
            )

        if is_with_pictures(prompt):
            return await self.in_media_thread(check)
        return await self.in_thread(check, has_grammar=params.grammar_field is not None)

    async def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters in the same way as `prepare`.

        Raises:
            RequestError: the parameters are not valid.
            UnavailableError: the server is stopping, or checks of other grammars hang.
        """
        await self.in_thread(lambda: self._intake.check_params(params), has_grammar=params.grammar_field is not None)

    async def enforces(self, params: SamplingParams) -> bool:
        """Return whether this engine can enforce the grammar in sampling parameters."""
        try:
            await self.check_params(params)
        except (GrammarError, UnsupportedFeatureError):
            return False
        return True

    async def in_thread(self, function: Callable[[], T], *, has_grammar: bool = False) -> T:
        """Run a function in a thread and return its result.

        Args:
            has_grammar: whether the function checks a grammar. If so, it runs in a thread for checks of grammars.

        Raises:
            UnavailableError: the server is stopping, or checks of other grammars hang.
            Exception: the function raised this error.
        """
        if has_grammar:
            return await self._grammar_threads.run(function)
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def in_media_thread(self, function: Callable[[], T]) -> T:
        """Run a function that prepares pictures in a thread for such work, and return its result.

        Pictures take much longer than texts, which must not wait for them.

        Raises:
            UnavailableError: the server is stopping.
            Exception: the function raised this error.
        """
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._media_threads, function)

    def is_token(self, text: str) -> bool:
        """Return whether a text is exactly one token of the model."""
        return self._encoder.is_token(text)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n]. Raises the errors of `prepare`."""
        return await self.in_thread(lambda: self._encoder.encode_text(text, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Message], **template_args: Any) -> TokenIds:
        """Return a chat's token ids, int32 [n]. Raises the errors of `prepare`."""
        run = self.in_media_thread if is_with_pictures(messages) else self.in_thread
        found = await run(lambda: self._encoder.encode_chat(messages, template_args))
        return found.media.shown(found.token_ids) if isinstance(found, MediaTokens) else found

    async def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, int32 [n].

        Raises:
            InvalidPromptError: an id is outside the vocabulary.
        """
        return await self.in_thread(lambda: self._encoder.decode(token_ids, skip_special_tokens))

    def close(self) -> None:
        """Refuse further calls. Calls that have begun continue in their threads."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._media_threads.shutdown(wait=False, cancel_futures=True)
