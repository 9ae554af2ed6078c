"""The detokenizer in a thread, over real sockets: it returns text for every completion, and forgets ended ones."""

import os
import threading

import pytest

from graftlm.demo import demo_checkpoint
from graftlm.errors import GraftlmError
from graftlm.processes.channels import Inbox, Outbox
from graftlm.processes.detokenizer_process import DetokenizerProcess
from graftlm.processes.messages import (
    Abort,
    Call,
    Generate,
    LoadTokenizer,
    Opened,
    Ready,
    Reply,
    Shutdown,
    TokenBatch,
    params_to_wire,
)
from graftlm.scheduling import Failure, Finish, RequestUpdate
from graftlm.tokenization import Tokenizer
from graftlm.tokenization.token_decoder import RustTokenDecoder
from graftlm.types import FinishReason, SamplingParams

STOP = Finish(FinishReason.LENGTH)


class Broken:
    """A decoder like another one, except that the library raises at one token."""

    def __init__(self, decoder, token_id, error):
        self.decoder, self.token_id, self.error = decoder, token_id, error

    def decode(self, token_ids, skip_special_tokens=True):
        if self.token_id in list(token_ids):
            raise self.error
        return self.decoder.decode(token_ids, skip_special_tokens)

    def is_special(self, token_id):
        return self.decoder.is_special(token_id)

    def is_known(self, token_id):
        return self.decoder.is_known(token_id)


class Panic(BaseException):
    """An exception like the panics of the Rust library."""


class Running:
    """A detokenizer in a thread, and the test's end of its channels."""

    def __init__(self, folder, load_tokenizer):
        self.from_it = Inbox(f"ipc://{folder}/main")
        self._inbox = Inbox(f"ipc://{folder}/detokenizer")
        self._to_main = Outbox(f"ipc://{folder}/main")
        self.to_it = Outbox(f"ipc://{folder}/detokenizer")
        self.process = DetokenizerProcess("detokenizer", self._inbox, self._to_main, load_tokenizer)
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.process.run()
        except GraftlmError as error:
            self.error = error

    def ask(self, *messages):
        """Send messages, and return the answer to the last one."""
        for message in messages:
            self.to_it.send(message)
        return self.next()

    def next(self):
        found = list(self.from_it.receive(10.0))
        assert len(found) == 1
        return found[0]

    def text(self, completion_id, *token_ids, finish=None):
        batch = self.ask(TokenBatch(updates=[RequestUpdate(completion_id, token_ids, finish=finish)]))
        return batch.texts[0]

    def end(self):
        self.to_it.send(Shutdown())
        self.thread.join(10)
        assert not self.thread.is_alive()
        for end in (self.to_it, self._to_main):
            end.close(deliver=False)
        self.from_it.close()
        self._inbox.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_checkpoint())


@pytest.fixture
def start(tmp_path, tokenizer):
    started = []

    def start(load_tokenizer=RustTokenDecoder.from_json):
        running = Running(tmp_path, load_tokenizer)
        started.append(running)
        return running

    yield start
    for running in started:
        running.end()


@pytest.fixture
def ready(start, tokenizer):
    running = start()
    assert running.ask(LoadTokenizer(json=tokenizer.to_json())) == Ready(
        process="detokenizer", pid=os.getpid(), info={}
    )
    return running


def opened(*completion_ids, params=SamplingParams()):  # noqa: B008  # it is immutable
    return Opened(completion_ids=list(completion_ids), params=params_to_wire(params))


def test_the_texts_of_mixed_completions_equal_the_tokenizers_decoding(ready, tokenizer):
    texts = {"a": "Once upon a time, 你好 😀!", "b#0": "naïve café", "b#1": "\n\n  x"}
    ids = {
        completion_id: tokenizer.encode(text, add_special_tokens=False).tolist()
        for completion_id, text in texts.items()
    }
    ready.to_it.send(opened("a"))
    ready.to_it.send(opened("b#0", "b#1"))
    found = dict.fromkeys(texts, "")
    for i in range(max(map(len, ids.values()))):
        updates = [
            RequestUpdate(completion_id, (tokens[i],), finish=STOP if i == len(tokens) - 1 else None)
            for completion_id, tokens in ids.items()
            if i < len(tokens)
        ]
        batch = ready.ask(TokenBatch(updates=updates))
        assert batch.updates == updates
        for update, text in zip(batch.updates, batch.texts, strict=True):
            found[update.request_id] += text
    assert found == texts


def test_an_ended_completion_is_forgotten(ready, tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False).tolist()
    ready.to_it.send(opened("a"))
    assert ready.text("a", *ids, finish=STOP) == "hello"
    assert ready.text("a", *ids) == ""


def test_tokens_of_an_unknown_completion_are_forwarded_without_text(ready):
    update = RequestUpdate("of another time", (5, 6), finish=STOP)
    batch = ready.ask(TokenBatch(updates=[update]))
    assert (batch.updates, batch.texts) == ([update], [""])


@pytest.mark.parametrize(
    ("aborted", "kept"), [(["a"], ["b", "c"]), (["a", "c", "unknown"], ["b"]), ([], ["a", "b", "c"]), (None, [])]
)
def test_an_abort_forgets_the_named_completions_or_all(ready, tokenizer, aborted, kept):
    ids = tokenizer.encode("hello", add_special_tokens=False).tolist()
    ready.to_it.send(opened("a", "b", "c"))
    ready.to_it.send(Abort(completion_ids=aborted, reason="their scheduler died"))
    assert [completion_id for completion_id in "abc" if ready.text(completion_id, *ids, finish=STOP)] == kept


@pytest.mark.parametrize("error", [ValueError("odd token"), Panic("odd token")])
@pytest.mark.parametrize("finish", [None, STOP])
def test_a_text_that_cannot_be_decoded_fails_only_its_request(start, tokenizer, error, finish):
    ids = tokenizer.encode("hello", add_special_tokens=False).tolist()
    bad = next(i for i in range(300, 400) if i not in ids)
    running = start(lambda json: Broken(RustTokenDecoder.from_json(json), bad, error))
    running.ask(LoadTokenizer(json=tokenizer.to_json()))
    updates = [RequestUpdate("a", (bad,), finish=finish), RequestUpdate("b", tuple(ids), finish=STOP)]
    batch = running.ask(opened("a", "b"), TokenBatch(updates=updates))
    assert batch.texts == ["", "hello"]
    failed = batch.updates[0].finish
    assert (failed.reason, failed.failure) == (FinishReason.ERROR, Failure.ENGINE)
    assert "odd token" in failed.error
    assert batch.updates[1] == updates[1]
    assert running.text("a", *ids, finish=STOP) == ""


def test_calls_are_answered_and_unexpected_messages_are_ignored(ready):
    odd = Generate(prompt_id="a", prompt=b"", params={}, seed=1)
    assert ready.ask(odd, Call(call_id=9, name="ping")) == Reply(process="detokenizer", call_id=9)


def test_tokens_before_the_tokenizer_end_the_process_with_an_error(start):
    running = start()
    running.to_it.send(opened("a"))
    running.thread.join(10)
    assert "before the tokenizer" in str(running.error)
