"""The server's real processes, used as by HTTP handlers."""

import asyncio
import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from graftlm import Engine, EngineConfig, SamplingParams
from graftlm.checkpoint import resolve_checkpoint
from graftlm.errors import (
    InvalidPromptError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from graftlm.processes.assembly import assemble_manager
from graftlm.processes.launcher import Launcher
from graftlm.processes.prompt_traces import request_trace_var
from graftlm.registry import Registry
from graftlm.request_options import RequestOptions
from graftlm.tokenization import Tokenizer
from graftlm.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=24)
CONFIG = {
    "model": "demo",
    "memory": {"kv_tokens": 4096},
    "scheduling": {"max_running_requests": 16, "max_queued_requests": 32},
    "parallel": {"data": 2},
    "server": {"restart": True},
}


class Recorder:
    """Records its calls."""

    def __init__(self):
        self.first, self.more, self.ended = [], [], []

    def first_token(self, seconds):
        self.first.append(seconds)

    def more_tokens(self, seconds, num_tokens):
        self.more.append((seconds, num_tokens))

    def finished(self, output, seconds, outcome):
        self.ended.append((output, seconds, outcome))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    """Run two replicas and a detokenizer; yields (manager, launcher, recorder)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = EngineConfig.load(CONFIG)
    launcher = Launcher(config)
    recorder = Recorder()
    try:
        await launcher.start()
        manager = await assemble_manager(config, Registry.load(), launcher, recorder)
        yield manager, launcher, recorder
        manager.close()
        with pytest.raises(UnavailableError, match="stopping"):
            await manager.preparer.encode("too late")
    finally:
        await launcher.close()


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 4096}) as it:
        yield it


async def until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def run(manager, prompt, params=GREEDY, request_id=None, **options):
    prepared = await manager.prepare(prompt, params, RequestOptions(**options), request_id=request_id)
    return await (await manager.start(prepared)).result()


def pages_come_home(manager):
    """Return whether no request holds a page in any replica."""
    loads = [replica.load for replica in manager.replicas.replicas]
    return all(
        load
        and load.stats.running_requests == load.stats.waiting_requests == 0
        and load.stats.owned_pages == load.stats.locked_pages == 0
        for load in loads
    )


class TracedEvents:
    """Records the events of one request and of its prompts."""

    def __init__(self):
        self.events = []

    def begin_prompt(self, request):
        self.events.append("begin")
        return self

    def end(self, output, outcome):
        self.events.append((outcome, output.usage.completion_tokens))

    def cancel(self):
        self.events.append("cancel")

    @contextmanager
    def current(self):
        """Trace what starts in this context."""
        token = request_trace_var.set(self)
        try:
            yield self
        finally:
            request_trace_var.reset(token)


async def test_the_trace_of_a_request_receives_the_end_of_each_prompt(running):
    manager, _, _ = running
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with TracedEvents().current() as trace:
        outputs = [await run(manager, "a", params) for _ in range(2)]
    assert [output.usage.completion_tokens for output in outputs] == [3, 3]
    assert trace.events == ["begin", ("length", 3)] * 2


async def test_the_trace_of_a_request_forgets_a_prompt_that_cannot_be_sent(running):
    manager, _, _ = running
    prepared = replace(await manager.prepare("a", GREEDY), request_id="\ud800")
    with TracedEvents().current() as trace, pytest.raises(RequestError, match="invalid Unicode"):
        await manager.start(prepared)
    assert trace.events == ["begin", "cancel"]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=60, stop=["e ", "zz"]),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=16, seed=7, n=3, top_p=0.9),
        SamplingParams(
            temperature=0,
            max_tokens=40,
            json_schema={
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
    ],
    ids=["greedy", "stop", "logprobs", "seeded", "schema"],
)
async def test_output_equals_the_in_process_engines(running, engine, params):
    manager, _, _ = running
    prompts = ["Which day comes after Monday?", [5, 6, 7, 8], [{"role": "user", "content": "What is 2 plus 3?"}]]
    expected = await asyncio.to_thread(engine.generate, prompts, params)
    served = await asyncio.gather(*[run(manager, prompt, params) for prompt in prompts])
    for mine, theirs in zip(served, expected, strict=True):
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        assert [c.token_ids for c in mine.completions] == [c.token_ids for c in theirs.completions]
        assert [c.text for c in mine.completions] == [c.text for c in theirs.completions]
        assert [c.finish_reason for c in mine.completions] == [c.finish_reason for c in theirs.completions]
        assert [c.matched_stop for c in mine.completions] == [c.matched_stop for c in theirs.completions]
        assert (mine.usage.prompt_tokens, mine.usage.completion_tokens) == (
            theirs.usage.prompt_tokens,
            theirs.usage.completion_tokens,
        )
        if params.logprobs is not None:
            for found, wanted in ((mine.logprobs, theirs.logprobs), (mine.prompt_logprobs, theirs.prompt_logprobs)):
                pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None]
                assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs]
                np.testing.assert_allclose([a.logprob for a, _ in pairs], [b.logprob for _, b in pairs], atol=1e-3)


async def test_deltas_form_the_result(running):
    manager, _, _ = running
    generation = await manager.start(
        await manager.prepare("Once there was", SamplingParams(max_tokens=30, n=2, seed=3))
    )
    texts, tokens, reasons = ["", ""], [[], []], [None, None]
    async for deltas in generation:
        for delta in deltas:
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.token_ids
            reasons[delta.index] = delta.finish_reason
    output = generation.snapshot()
    assert texts == [c.text for c in output.completions]
    assert [tuple(t) for t in tokens] == [c.token_ids for c in output.completions]
    assert reasons == [c.finish_reason for c in output.completions]
    assert generation.num_output_tokens == output.usage.completion_tokens


async def test_requests_are_distributed_over_replicas_and_all_pages_are_freed(running):
    manager, _, recorder = running
    before = len(recorder.ended)
    prompts = [[10 + i, 11, 12, 13] for i in range(24)]
    outputs = await asyncio.gather(*[run(manager, prompt) for prompt in prompts])
    assert len(outputs) == 24
    await until(lambda: pages_come_home(manager))
    assert all(replica.load.stats.finished_requests > 4 for replica in manager.replicas.replicas)
    assert [r.queued_tokens for r in manager.replicas.replicas] == [0, 0]
    assert [r.num_requests for r in manager.replicas.replicas] == [0, 0]
    assert len(recorder.ended) == before + 24


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", GREEDY, InvalidPromptError),
        ([], GREEDY, InvalidPromptError),
        ([10**6], GREEDY, InvalidPromptError),
        ([-1], GREEDY, InvalidPromptError),
        ("\ud800", GREEDY, InvalidPromptError),
        ([5] * 5000, GREEDY, PromptTooLongError),
        ([{"role": "user"}], GREEDY, InvalidPromptError),
        ("x", SamplingParams(logit_bias={10**7: 1}), RequestError),
        ("x", SamplingParams(json_schema={"type": "nonsense"}), RequestError),
    ],
)
async def test_a_wrong_request_is_refused_before_it_starts(running, prompt, params, error):
    manager, _, _ = running
    with pytest.raises(error):
        await manager.prepare(prompt, params)
    assert manager.num_requests == 0


async def test_an_id_in_use_is_refused_and_can_be_used_again_later(running):
    manager, _, _ = running
    generation = await manager.start(
        await manager.prepare("a", SamplingParams(max_tokens=500, ignore_eos=True), request_id="mine")
    )
    with pytest.raises(RequestError, match="'mine' is in use"):
        await manager.prepare("b", GREEDY, request_id="mine")
    generation.abort()
    assert (await generation.result()).finish_reason is FinishReason.ABORT
    assert (await run(manager, "b", request_id="mine")).finish_reason is not None


async def test_aborting_ends_a_stream_and_frees_its_pages(running):
    manager, _, _ = running
    long = SamplingParams(max_tokens=900, ignore_eos=True, n=3)
    generation = await manager.start(await manager.prepare("Tell me", long, request_id="long"))
    await anext(generation)
    manager.abort("long")
    manager.abort("unknown")
    output = await generation.result()
    assert {c.finish_reason for c in output.completions} == {FinishReason.ABORT}
    await until(lambda: pages_come_home(manager))


async def test_a_request_that_takes_too_long_raises_a_timeout(running):
    manager, _, _ = running
    with pytest.raises(RequestTimeoutError, match="timed out"):
        await run(manager, "Tell me", SamplingParams(max_tokens=900, ignore_eos=True), timeout_s=0.05)
    await until(lambda: pages_come_home(manager))


async def test_a_full_queue_refuses_a_request_and_others_continue(running):
    manager, _, _ = running
    slow = SamplingParams(max_tokens=400, ignore_eos=True)
    prepared = [await manager.prepare([20 + i], slow) for i in range(120)]
    outcomes = await asyncio.gather(*[manager.start(request) for request in prepared], return_exceptions=True)
    started = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert refused
    assert all(isinstance(error, QueueFullError) for error in refused)
    manager.abort_all()
    ended = await asyncio.gather(*[generation.result() for generation in started])
    assert len(ended) == len(started) >= 64
    await until(lambda: pages_come_home(manager))


async def test_start_all_starts_all_requests_or_none(running):
    manager, _, _ = running
    slow = SamplingParams(max_tokens=400, ignore_eos=True)
    requests = [await manager.prepare([20 + i], slow) for i in range(120)]
    running_already = await manager.start_all(requests[:60])
    with pytest.raises(QueueFullError):
        await manager.start_all(requests[60:])
    await until(lambda: manager.num_requests == 60)
    manager.abort_all()
    await asyncio.gather(*[generation.result() for generation in running_already])
    await until(lambda: manager.num_requests == 0 and pages_come_home(manager))


async def test_more_requests_than_the_queue_can_ever_hold_are_refused_permanently(running):
    manager, _, _ = running
    requests = [await manager.prepare([20 + i], GREEDY) for i in range(65)]
    with pytest.raises(RequestError, match="at most 64 requests may wait"):
        await manager.start_all(requests)
    with pytest.raises(RequestError, match="at most 64 requests may wait"):
        await manager.start(await manager.prepare([20], SamplingParams(n=100)))


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"stop": ["\ud800"]}, {}),
        ({}, {"request_id": "\ud800"}),
        ({}, {"cache_salt": "\ud800"}),
        ({}, {"priority": 2**70}),
    ],
    ids=["stop", "request_id", "cache_salt", "priority"],
)
async def test_a_request_that_cannot_be_encoded_is_refused_and_leaves_nothing(running, params, options):
    manager, _, _ = running
    with pytest.raises(RequestError):
        await run(manager, "x", SamplingParams(max_tokens=1, **params), **options)
    assert manager.num_requests == 0


async def test_a_flush_removes_cached_prefixes(running):
    manager, _, _ = running
    prompt = list(range(300, 400))
    await asyncio.gather(*[run(manager, prompt) for _ in range(8)])
    assert (await run(manager, prompt)).usage.cached_tokens == 99
    assert await manager.flush_cache() > 0
    assert (await run(manager, prompt)).usage.cached_tokens == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_requests_continue_with_the_same_tokens_after_a_pause(running, mode):
    manager, _, _ = running
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    expected = (await run(manager, "Once upon a time", params)).token_ids
    generation = await manager.start(await manager.prepare("Once upon a time", params))
    await anext(generation)
    await manager.pause(mode)
    waiting = asyncio.ensure_future(run(manager, "later"))
    await asyncio.sleep(0.1)
    seen = generation.num_output_tokens
    await asyncio.sleep(0.2)
    assert generation.num_output_tokens == seen < 300
    assert not waiting.done()
    await manager.resume()
    assert (await generation.result()).token_ids == expected
    assert (await waiting).finish_reason is not None


async def test_resume_works_after_every_replica_has_died(running):
    manager, launcher, _ = running
    await until(lambda: not manager.health.problems, 60)
    await manager.pause("in_place")
    for name in ("scheduler-0", "scheduler-1"):
        os.kill(launcher.pids[name], signal.SIGKILL)
    await until(lambda: len(manager.health.problems) == 2)
    await manager.resume()
    async with asyncio.timeout(60):
        assert (await run(manager, "Which day comes after Monday?")).finish_reason is not None
    await until(lambda: not manager.health.problems, 60)


async def test_megabytes_of_text_are_refused_without_tokenising(running):
    manager, _, _ = running
    text = "word " * 5_000_000
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(PromptTooLongError, match="characters"):
            await manager.prepare(prompt, GREEDY)
    with pytest.raises(PromptTooLongError, match="characters"):
        await manager.preparer.encode(text)
    with pytest.raises(PromptTooLongError, match=r"the prompt has 2\d\d\d tokens"):
        await manager.prepare("word " * 2100, GREEDY)


async def test_a_cancelled_start_leaves_no_request(running):
    manager, _, _ = running
    task = asyncio.ensure_future(manager.start(await manager.prepare("x", SamplingParams(max_tokens=900))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: manager.num_requests == 0 and pages_come_home(manager))


async def test_a_cancelled_start_of_several_requests_ends_the_started_ones(running):
    manager, launcher, _ = running
    # otherwise the started requests would end by themselves
    await manager.calls.call_schedulers("pause", retract=False)
    os.kill(launcher.pids["scheduler-1"], signal.SIGSTOP)
    try:
        starting = asyncio.ensure_future(manager.start_all([await manager.prepare([20 + i], GREEDY) for i in range(4)]))
        await until(lambda: manager.num_requests == 4)
        await manager.calls.call("scheduler-0", "pause", retract=False)  # answered after its requests, in order
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    finally:
        os.kill(launcher.pids["scheduler-1"], signal.SIGCONT)
    await until(lambda: manager.num_requests == 0, 5)
    await manager.calls.call_schedulers("resume")
    await until(lambda: pages_come_home(manager))


@pytest.mark.parametrize("name", ["scheduler-1", "detokenizer"])
async def test_a_killed_process_fails_its_requests_and_later_ones_succeed(running, name):
    manager, launcher, _ = running
    await until(lambda: not manager.health.problems, 60)
    slow = SamplingParams(max_tokens=900, ignore_eos=True)
    generations = await manager.start_all([await manager.prepare([30 + i], slow) for i in range(8)])
    await asyncio.gather(*[anext(generation) for generation in generations])
    os.kill(launcher.pids[name], signal.SIGKILL)
    async with asyncio.timeout(5):
        await until(lambda: manager.health.problems)
        for generation in generations:
            generation.abort()
        outcomes = await asyncio.gather(*[g.result() for g in generations], return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, UnavailableError)]
    assert {str(error) for error in failed} == {f"{name} died (killed by SIGKILL); send the request again"}
    assert len(failed) == (8 if name == "detokenizer" else 4)
    async with asyncio.timeout(60):
        assert (await run(manager, "Which day comes after Monday?")).finish_reason is not None
    await until(lambda: not manager.health.problems, 60)
    await until(lambda: pages_come_home(manager))


async def test_other_users_cannot_read_the_processes_files(running):
    _, launcher, _ = running
    assert launcher.folder.stat().st_mode & 0o077 == 0


async def test_a_tokenizer_from_json_decodes_like_the_checkpoints():
    tokenizer = Tokenizer.load(resolve_checkpoint("demo"))
    from graftlm.tokenization.token_decoder import RustTokenDecoder

    decoder = RustTokenDecoder.from_json(tokenizer.to_json())
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, 20)
        for skip in (True, False):
            assert decoder.decode(ids, skip) == tokenizer.decode(ids, skip)
    assert [decoder.is_special(i) for i in range(tokenizer.vocab_size)] == [
        tokenizer.is_special(i) for i in range(tokenizer.vocab_size)
    ]
