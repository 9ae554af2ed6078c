"""The detokenizer in a process of its own: tokens of all replicas in, text out."""

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
    """Follows the text of every completion under way."""

    def __init__(self, name: str, inbox: Inbox, to_main: Outbox, load_tokenizer: Callable[[str], TokenDecoder]) -> None:
        """Take the channels.

        Args:
            load_tokenizer: makes a decoder of the `tokenizers` library's JSON.
        """
        self._name = name
        self._inbox = inbox
        self._to_main = to_main
        self._load_tokenizer = load_tokenizer
        self._tokenizer: TokenDecoder | None = None
        self._texts: dict[CompletionId, CompletionText] = {}
        self._closing = False

    def run(self) -> None:
        """Serve until told to shut down."""
        while not self._closing:
            for message in self._inbox.receive(None):
                self._take(message)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case TokenBatch():
                self._to_main.send(self._with_texts(message.updates))
            case Opened():
                self._open(message.completion_ids, message)
            case LoadTokenizer():
                self._tokenizer = self._load_tokenizer(message.json)
                self._to_main.send(Ready(process=self._name, pid=os.getpid(), info={}))
            case Abort():  # their scheduler died, so their last updates will not come
                for completion_id in list(self._texts) if message.completion_ids is None else message.completion_ids:
                    self._texts.pop(completion_id, None)
            case Call():  # the only question there is: whether it answers
                self._to_main.send(Reply(process=self._name, call_id=message.call_id))
            case Shutdown():
                self._closing = True
            case _:
                logger.error("%s cannot take a message of type %s", self._name, type(message).__name__)

    def _open(self, completion_ids: Sequence[CompletionId], message: Opened) -> None:
        if self._tokenizer is None:
            raise GraftlmError("tokens came before the tokenizer")
        params = params_from_wire(message.params)
        for completion_id in completion_ids:
            self._texts[completion_id] = CompletionText(TextStream(self._tokenizer, params), params.include_stop)

    def _with_texts(self, updates: list[RequestUpdate]) -> TextBatch:
        """Add each update's text; one whose text cannot be made fails its own request."""
        texts = [""] * len(updates)
        for i, update in enumerate(updates):
            text = self._texts.get(update.request_id)
            if text is None:
                continue  # of another detokenizer's time, or it has failed
            try:
                texts[i] = text.push(update)
            except BaseException as error:  # the Rust library's panics are no Exception
                logger.exception("completion %s: its text failed", update.request_id)
                finish = Finish(FinishReason.ERROR, error=f"detokenizing failed: {error}", failure=Failure.ENGINE)
                updates[i] = update = msgspec.structs.replace(update, finish=finish)
            if update.finish is not None:
                del self._texts[update.request_id]
        return TextBatch(updates=updates, texts=texts)
