"""Messages are unchanged after encoding and decoding, and malformed ones are refused."""

import msgspec
import numpy as np
import pytest

from graftlm.errors import SamplingParamsError
from graftlm.pooling.pooling import Pooling
from graftlm.processes import messages as m
from graftlm.records import EngineStats, StateStats, TierStats
from graftlm.request_options import RequestOptions
from graftlm.scheduling import Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, SamplingParams, TokenLogprob, Usage

UPDATES = [
    RequestUpdate("a", (5,), cached_tokens=3, queue_s=0.1, first_token_s=0.2),
    RequestUpdate("b", (1, 2), (TokenLogprob(1, -0.5, ((1, -0.5), (7, -1.0))), TokenLogprob(2, 0.0))),
    RequestUpdate("c", prompt_logprobs=(TokenLogprob(3, -2.0),)),
    RequestUpdate("d", (9,), finish=Finish(FinishReason.STOP, matched_stop=9), usage=Usage(4, 1, 0), total_s=1.5),
    RequestUpdate("e", finish=Finish(FinishReason.STOP, matched_stop="\n\n"), usage=Usage()),
    RequestUpdate("f", finish=Finish(FinishReason.ERROR, error="é 🎉", failure=Failure.ENGINE), num_retractions=2),
    RequestUpdate("g", finish=Finish(FinishReason.ABORT, error="late", failure=Failure.TIMEOUT), embedding=b"\0\1"),
]
STATS = EngineStats(
    **dict.fromkeys(EngineStats.__dataclass_fields__, 1)
    | {"tiers": TierStats(1), "states": StateStats(1, 1, 1, 1, 1), "drafts": {"suffix": (1, 1)}}
)
MESSAGES = [
    m.Generate(
        prompt_id="r",
        prompt=np.arange(3, dtype=np.int32).tobytes(),
        params={"logit_bias": {3: -1.5}, "json_schema": {"type": "object"}},
        seed=2**63 - 2,
        options=RequestOptions(
            cache_salt="tenant", priority=-(2**40), timeout_s=0.5, adapter="a", pooling=Pooling("labels", (3, 5))
        ),
    ),
    m.Abort(completion_ids=None, reason="all"),
    m.Abort(completion_ids=["a#0", "a#1"], reason="left"),
    m.Call(call_id=3, name="tree", arguments={"limit": 5}),
    m.UseDetokenizer(endpoint="ipc:///x"),
    m.LoadTokenizer(json="{}"),
    m.Shutdown(),
    m.Opened(completion_ids=["a"], params={}),
    m.TokenBatch(updates=UPDATES),
    m.Accepted(prompt_id="a"),
    m.Rejected(prompt_id="a", error="QueueFullError", message="full"),
    m.TextBatch(updates=UPDATES, texts=["t"] * len(UPDATES)),
    m.Progress(process="p", stage="s"),
    m.Ready(process="p", pid=7, info={"limits": {"vocab_size": 5}}),
    m.Failed(process="p", pid=7, error="ConfigError", message="no"),
    m.Reply(process="p", call_id=3, value=[1, {"a": None}], error=None),
    m.Load(process="p", stats=STATS, histograms={"h": ([1, 2, 3], 0.5)}),
    m.CacheChanges(process="p", changes=[("cleared", b""), ("stored", b"12345678")]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_unchanged_after_encoding_and_decoding(message):
    assert m.decode(m.encode(message)) == message


def test_every_type_of_message_is_among_the_cases():
    kinds = {kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)} - {m.Message}
    assert kinds == {type(message) for message in MESSAGES}


def test_every_message_has_the_protocol_version():
    for message in MESSAGES:
        assert msgspec.msgpack.decode(m.encode(message))[1] == m.PROTOCOL_VERSION


def test_a_message_of_another_version_is_refused_with_both_versions():
    wire = msgspec.msgpack.decode(m.encode(m.Shutdown()))
    wire[1] = 7
    with pytest.raises(m.MessageError, match="protocol version 7, but this process has version 1"):
        m.decode(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"hello", msgspec.msgpack.encode(["Nonsense", 1]), msgspec.msgpack.encode({"a": 1})]
)
def test_a_malformed_message_is_refused(data):
    with pytest.raises(m.MessageError, match="cannot be decoded"):
        m.decode(data)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, temperature=0.0, stop=["a", "b"], stop_token_ids=[1, 2], n=3, seed=5),
        SamplingParams(logit_bias={1: 2.0, 7: -100}, logprobs=0, prompt_logprobs=5, include_stop=True),
        SamplingParams(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}),
        SamplingParams(regex="[0-9]+", logits_processors={"name": {"option": [1, 2.5, None]}}),
    ],
)
def test_sampling_params_are_unchanged_after_encoding_and_decoding(params):
    message = m.Generate(prompt_id="r", prompt=b"", params=m.params_to_wire(params), seed=1)
    decoded = m.decode(m.encode(message))
    assert m.params_from_wire(decoded.params) == params


def test_default_sampling_params_are_encoded_as_an_empty_mapping():
    assert m.params_to_wire(SamplingParams()) == {}


def test_decoded_sampling_params_are_checked():
    with pytest.raises(SamplingParamsError, match="temperature"):
        m.params_from_wire({"temperature": -1.0})


@pytest.mark.parametrize("value", ["\ud800", 2**70, object(), {1: {"deep": "\udfff"}}])
def test_a_message_that_cannot_be_encoded_is_an_error(value):
    with pytest.raises(m.MessageError, match="Call cannot be encoded"):
        m.encode(m.Call(call_id=1, name="n", arguments={"value": value}))
