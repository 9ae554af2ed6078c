"""Tokenises and checks requests in threads, beside the event loop that serves HTTP."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from graftlm.errors import GrammarError, UnavailableError, UnsupportedFeatureError
from graftlm.intake import Intake, draw_seed
from graftlm.processes.check_threads import CheckThreads
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.prompt_encoder import PromptEncoder
from graftlm.prompts import Prompt, TextPair
from graftlm.request_options import RequestOptions
from graftlm.types import Message, SamplingParams, TokenIds

__all__ = ["RequestPreparer"]

T = TypeVar("T")

_GRAMMAR_CHECK_TIMEOUT_S: Final = 60.0


class RequestPreparer:
    """Calls the tokenizer and the intake in threads. Used by one event loop.

    Grammars are checked in threads of their own, because a check may take seconds or never return.

    Args:
        encoder: tokenises.
        intake: checks prompts and parameters.
    """

    def __init__(self, encoder: PromptEncoder, intake: Intake) -> None:
        self._encoder = encoder
        self._intake = intake
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="graftlm-tokenizer")
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
    ) -> PreparedRequest:
        """Tokenise and check a prompt in one thread.

        Args:
            prompt: text, a pair of texts, token ids, or chat messages, which the checkpoint's chat template renders.
            params: if `adapt` is given, only whether they have a grammar counts.
            request_id: None draws one.
            template_args: further variables of the chat template.
            adapt: returns the sampling parameters for the prompt's token ids, with a grammar if `params` have one; runs
                in that thread.

        Raises:
            RequestError: the prompt or its parameters are wrong.
            UnavailableError: the server is stopping.
        """

        def check() -> PreparedRequest:
            pooling, intake = options.pooling, self._intake
            token_ids = intake.check_prompt(self._encoder.encode(prompt, template_args or {}), pooling=pooling)
            checked, unenforced = intake.check_params(params if adapt is None else adapt(token_ids))
            intake.check_room(len(token_ids), checked, pooling=pooling)
            return PreparedRequest(
                request_id=uuid.uuid4().hex if request_id is None else request_id,
                prompt_token_ids=token_ids,
                params=checked,
                seed=draw_seed() if checked.seed is None else checked.seed,
                options=options,
                unenforced=unenforced,
            )

        return await self.in_thread(check, has_grammar=params.grammar_field is not None)

    async def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters alone, as `prepare` does.

        Raises:
            RequestError: they are wrong.
        """
        await self.in_thread(lambda: self._intake.check_params(params), has_grammar=params.grammar_field is not None)

    async def enforces(self, params: SamplingParams) -> bool:
        """Whether this engine can enforce the grammar of sampling parameters."""
        try:
            await self.check_params(params)
        except (GrammarError, UnsupportedFeatureError):
            return False
        return True

    async def in_thread(self, function: Callable[[], T], *, has_grammar: bool = False) -> T:
        """Run a function in a thread; in one of those for grammars if it checks one.

        Raises:
            UnavailableError: the server is stopping, or checks of other grammars hang.
        """
        if has_grammar:
            return await self._grammar_threads.run(function)
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def is_token(self, text: str) -> bool:
        """Whether a text is one token of the vocabulary that is not special."""
        return self._encoder.is_token(text)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n]; raises as `prepare`."""
        return await self.in_thread(lambda: self._encoder.encode_text(text, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Message], **template_args: Any) -> TokenIds:
        """Return a chat's token ids, int32 [n]; raises as `prepare`."""
        return await self.in_thread(lambda: self._encoder.encode_chat(messages, template_args))

    async def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, int32 [n].

        Raises:
            InvalidPromptError: an id is outside the vocabulary.
        """
        return await self.in_thread(lambda: self._encoder.decode(token_ids, skip_special_tokens))

    def close(self) -> None:
        """Accept no more work. Work that has begun ends in its thread."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
