"""The detokenizer process, which converts the tokens of all replicas to text."""

import logging
import os
from collections.abc import Callable, Sequence

import msgspec

from graftlm.errors import GraftlmError
from graftlm.outputs import CompletionText
from graftlm.processes.channels import Inbox, Outbox
from graftlm.processes.messages import (
    Abort,
    AnyMessage,
    Call,
    LoadTokenizer,
    Opened,
    Ready,
    Reply,
    Shutdown,
    TextBatch,
    TokenBatch,
    params_from_wire,
)
from graftlm.scheduling import CompletionId, Failure, Finish, RequestUpdate
from graftlm.tokenization import TextStream, TokenDecoder
from graftlm.types import FinishReason

__all__ = ["DetokenizerProcess"]

logger = logging.getLogger(__name__)


class DetokenizerProcess:
    """Converts tokens to text. It stores the state of the conversion for each running completion.

    Args:
        load_tokenizer: creates a decoder from JSON of the `tokenizers` library.
    """

    def __init__(self, name: str, inbox: Inbox, to_main: Outbox, load_tokenizer: Callable[[str], TokenDecoder]) -> None:
        self._name = name
        self._inbox = inbox
        self._to_main = to_main
        self._load_tokenizer = load_tokenizer
        self._tokenizer: TokenDecoder | None = None
        self._texts: dict[CompletionId, CompletionText] = {}
        self._closing = False

    def run(self) -> None:
        """Handle messages until a Shutdown message arrives."""
        while not self._closing:
            for message in self._inbox.receive(None):
                self._handle(message)

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case TokenBatch():
                self._to_main.send(self._with_texts(message.updates))
            case Opened():
                self._open(message.completion_ids, message)
            case LoadTokenizer():
                self._tokenizer = self._load_tokenizer(message.json)
                self._to_main.send(Ready(process=self._name, pid=os.getpid(), info={}))
            case Abort():  # sent after the death of a scheduler, which cannot send the last updates
                for completion_id in list(self._texts) if message.completion_ids is None else message.completion_ids:
                    self._texts.pop(completion_id, None)
            case Call():  # the only call to a detokenizer is "ping"
                self._to_main.send(Reply(process=self._name, call_id=message.call_id))
            case Shutdown():
                self._closing = True
            case _:
                logger.error("%s cannot handle a message of type %s", self._name, type(message).__name__)

    def _open(self, completion_ids: Sequence[CompletionId], message: Opened) -> None:
        if self._tokenizer is None:
            raise GraftlmError("a request arrived before the tokenizer")
        params = params_from_wire(message.params)
        for completion_id in completion_ids:
            self._texts[completion_id] = CompletionText(TextStream(self._tokenizer, params), params.include_stop)

    def _with_texts(self, updates: list[RequestUpdate]) -> TextBatch:
        """Return updates with their texts. If the conversion of one completion fails, only this completion fails."""
        texts = [""] * len(updates)
        for i, update in enumerate(updates):
            text = self._texts.get(update.request_id)
            if text is None:
                continue  # the completion has failed, or began before this process was restarted
            try:
                texts[i] = text.push(update)
            except BaseException as error:  # panics of the Rust library are not instances of Exception
                logger.exception("completion %s: detokenizing failed", update.request_id)
                finish = Finish(FinishReason.ERROR, error=f"detokenizing failed: {error}", failure=Failure.ENGINE)
                updates[i] = update = msgspec.structs.replace(update, finish=finish)
            if update.finish is not None:
                del self._texts[update.request_id]
        return TextBatch(updates=updates, texts=texts)
