"""The in-process engine from the user's side."""

import asyncio
import dataclasses
import gc
import itertools
import threading
import time
import weakref

import pytest

from graftlm import Engine, FinishReason, SamplingParams
from graftlm.errors import EngineClosedError, QueueFullError, RequestError
from graftlm.testing.hugging_face import HuggingFaceModel

GREEDY = SamplingParams(temperature=0, max_tokens=24)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", debug=True) as engine:
        yield engine


def wait_until(condition, limit_s=20):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        threading.Event().wait(0.005)


def test_text_token_ids_and_chats_are_prompts(engine):
    ids = engine.tokenizer.encode("The capital of France is").tolist()
    outputs = engine.generate(["The capital of France is", ids, CHAT], GREEDY)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[2].text == "The capital of France is Paris."
    assert outputs[2].finish_reason is FinishReason.STOP
    assert outputs[2].matched_stop == outputs[2].token_ids[-1]


@pytest.mark.parametrize("prompt", ["one text", [5, 6, 7], CHAT])
def test_one_prompt_returns_a_list_with_one_output(engine, prompt):
    assert len(engine.generate(prompt, GREEDY)) == 1


def test_no_prompts_return_no_outputs(engine):
    assert engine.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(engine):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = engine.generate(["a", "b", "c"], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 9]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    with pytest.raises(RequestError, match="sampling_params: got 3, expected one for each of 2 prompts"):
        engine.generate(["a", "b"], params)


def test_parameters_may_be_a_mapping(engine):
    (output,) = engine.generate("a", {"temperature": 0, "max_tokens": 3, "ignore_eos": True})
    assert len(output.token_ids) == 3
    with pytest.raises(RequestError, match="max_token"):
        engine.generate("a", {"max_token": 3})


def test_outputs_equal_transformers_generate(engine, checkpoint):
    oracle = HuggingFaceModel(checkpoint("demo"))
    ids = engine.tokenizer.encode_chat(CHAT).tolist()
    (output,) = engine.generate([ids], GREEDY)
    assert list(output.token_ids) == oracle.generate(ids, 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_engine_runs_in_every_floating_type(dtype):
    with Engine(model={"path": "demo", "dtype": dtype}) as engine:
        assert engine.generate([CHAT], GREEDY)[0].text == "The capital of France is Paris."


def test_a_stream_grows_to_the_output_of_generate(engine):
    outputs = list(engine.stream(CHAT, GREEDY))
    for before, after in itertools.pairwise(outputs):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    (whole,) = engine.generate([CHAT], GREEDY)
    assert (outputs[-1].text, outputs[-1].token_ids) == (whole.text, whole.token_ids)
    assert outputs[-1].finished
    assert not outputs[0].finished


def test_usage_and_timings_are_correct(engine):
    engine.flush_cache()
    first, second = (engine.generate([CHAT], GREEDY)[0] for _ in range(2))
    num_prompt = len(engine.tokenizer.encode_chat(CHAT))
    assert first.usage.prompt_tokens == num_prompt == len(first.prompt_token_ids)
    assert first.usage.completion_tokens == len(first.token_ids)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, num_prompt - 1)
    assert 0 <= first.timings.queue_s <= first.timings.first_token_s <= first.timings.total_s


def test_n_completions_share_the_prompt_and_have_different_tokens(engine):
    engine.flush_cache()
    (output,) = engine.generate([CHAT], SamplingParams(n=4, seed=3, temperature=2.0, max_tokens=12))
    assert [completion.index for completion in output.completions] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in output.completions}) > 1
    (alone,) = engine.generate([CHAT], SamplingParams(n=1, seed=3, temperature=2.0, max_tokens=12))
    assert alone.token_ids == output.completions[0].token_ids
    assert output.usage.completion_tokens == sum(len(c.token_ids) for c in output.completions)
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("Par", False, "The capital of France is "),
        ("is Par", False, "The capital of France "),
        (["xyz", "of France"], False, "The capital "),
        ("of France", True, "The capital of France"),
    ],
)
def test_a_stop_string_ends_the_text_even_across_tokens(engine, stop, include, text):
    params = SamplingParams(temperature=0, max_tokens=24, stop=stop, include_stop=include)
    (output,) = engine.generate([CHAT], params)
    assert output.text == text
    assert output.finish_reason is FinishReason.STOP
    assert output.matched_stop in params.stop_strings
    assert list(engine.stream(CHAT, params))[-1].text == text


@pytest.mark.parametrize(
    ("pattern", "fields", "text"),
    [
        ("P[a-z]r", {}, "The capital of France is "),
        ("is P[a-z]", {}, "The capital of France "),
        (["x+y", "o[a-z] F.*c"], {}, "The capital "),
        ("(?i)OF france", {"include_stop": True}, "The capital of France"),
        (r"\w+ is", {"stop": "Paris"}, "The capital of "),
        (r"\w+ is", {"stop": "France"}, "The capital of "),
        ("Fr.*s", {"stop": "zzz", "n": 2}, "The capital of "),
        ("^The [a-z]{3}", {"include_stop": True, "speculation": False}, "The cap"),
    ],
)
def test_a_stop_regex_ends_the_text_even_across_tokens(engine, pattern, fields, text):
    params = SamplingParams(temperature=0, max_tokens=24, stop_regex=pattern, **fields)
    (output,) = engine.generate([CHAT], params)
    for completion in output.completions:
        assert completion.text == text
        assert completion.finish_reason is FinishReason.STOP
        assert completion.matched_stop in params.stop_strings + params.stop_patterns
    streamed = [o.completions[0].text for o in engine.stream(CHAT, params)]
    assert streamed[-1] == text
    assert all(text.startswith(piece) for piece in streamed)


def test_a_stop_regex_has_no_effect_before_min_tokens(engine):
    (plain,) = engine.generate([CHAT], GREEDY)
    params = dataclasses.replace(GREEDY, stop_regex="[a-zA-Z]", min_tokens=4)
    (output,) = engine.generate([CHAT], params)
    assert 4 <= len(output.token_ids) < len(plain.token_ids)
    assert output.finish_reason is FinishReason.STOP
    assert output.text.startswith("The cap")
    assert plain.text.startswith(output.text)


def test_streamed_text_never_contains_part_of_a_stop_string(engine):
    params = SamplingParams(temperature=0, max_tokens=24, stop="France is Paris")
    assert all("France".startswith(o.text[15:]) for o in engine.stream(CHAT, params) if len(o.text) > 15)


@pytest.mark.parametrize(("include", "num_shown"), [(False, 3), (True, 4)])
def test_a_stop_token_ends_the_output_and_is_in_the_text_only_with_include_stop(engine, include, num_shown):
    (plain,) = engine.generate([CHAT], GREEDY)
    stop_id = plain.token_ids[3]
    params = SamplingParams(temperature=0, stop_token_ids=[stop_id], include_stop=include)
    (output,) = engine.generate([CHAT], params)
    assert output.token_ids == plain.token_ids[:4]
    assert output.matched_stop == stop_id
    assert output.text == engine.tokenizer.decode(plain.token_ids[:num_shown])
    assert list(engine.stream(CHAT, params))[-1].text == output.text


def test_a_stop_token_outside_the_vocabulary_has_no_effect(engine):
    (plain,) = engine.generate([CHAT], GREEDY)
    params = dataclasses.replace(GREEDY, stop_token_ids=[2048, 10**6], min_tokens=2)
    (output,) = engine.generate([CHAT], params)
    assert output.token_ids == plain.token_ids


def test_min_tokens_prevents_an_early_end(engine):
    (output,) = engine.generate([CHAT], SamplingParams(temperature=0, max_tokens=40, min_tokens=30))
    assert len(output.token_ids) >= 30
    assert not set(output.token_ids[:30]) & set(engine.model_config.eos_token_ids)


def test_logprobs_are_those_of_the_unmodified_model(engine, checkpoint):
    oracle = HuggingFaceModel(checkpoint("demo"))
    ids = engine.tokenizer.encode_chat(CHAT).tolist()
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = engine.generate([ids], params)
    expected = oracle.logits(ids + list(output.token_ids)).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(expected[position - 1, ids[position]].item(), abs=1e-4)
        assert len(entry.top) == 2
    for i, entry in enumerate(output.logprobs):
        row = expected[len(ids) - 1 + i]
        assert entry.token_id == output.token_ids[i]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", [None, "auto"])
def test_requested_tokens_have_the_logprobs_of_transformers(checkpoint, overlap, drafter):
    """Requests with and without requested tokens share the batch, and some are retracted because memory is short."""
    oracle = HuggingFaceModel(checkpoint("demo"))
    wanted = [(), (300,), (5, 301, 5, 0), tuple(range(256)), ()]
    prompts = [f"{i}, two, three, two, three, two," for i in range(len(wanted))]
    shared = {"temperature": 0.7, "max_tokens": 24, "ignore_eos": True, "prompt_logprobs": 0}
    params = [
        SamplingParams(seed=i, logprobs=i % 2, logprob_token_ids=ids, n=1 + i % 2, **shared)
        for i, ids in enumerate(wanted)
    ]
    config = {"scheduling": {"overlap": overlap}, "memory": {"kv_tokens": 128}, "speculation": drafter}
    with Engine(model="demo", debug=True, **config) as engine:
        ids = [engine.tokenizer.encode(prompt).tolist() for prompt in prompts]
        outputs = engine.generate(ids, params)
        assert engine.stats().retractions > 0
        plain = engine.generate(ids[:1], SamplingParams(temperature=0, max_tokens=2, logprobs=0))
    assert plain[0].logprobs[0].requested == ()
    for prompt, output, asked in zip(ids, outputs, wanted, strict=True):
        for completion in output.completions:
            expected = oracle.logits(prompt + list(completion.token_ids)).log_softmax(-1)
            entries = [*output.prompt_logprobs[1:], *completion.logprobs]
            assert len(entries) == len(prompt) - 1 + len(completion.token_ids)
            for entry, row in zip(entries, expected, strict=False):
                assert entry.requested == pytest.approx(row[list(asked)].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprob_token_ids": [1]}, "need logprobs or prompt_logprobs"),
        ({"logprob_token_ids": [-1], "logprobs": 0}, "logprob_token_ids must be token ids"),
        ({"logprob_token_ids": ["a"], "logprobs": 0}, "logprob_token_ids must be token ids"),
        ({"logprob_token_ids": range(257), "logprobs": 0}, "at most 256 are possible, got 257"),
        ({"logprob_token_ids": [10**6], "logprobs": 0}, "logprob_token_ids: token id 1000000 is outside"),
    ],
)
def test_wrong_requested_tokens_are_refused(engine, fields, says):
    with pytest.raises(RequestError, match=says):
        engine.generate(["a"], SamplingParams(**fields))


def test_completions_of_one_prompt_share_its_prompt_logprobs(engine):
    prompt = engine.tokenizer.encode("Report: three completions of one prompt").tolist()
    engine.flush_cache()
    before = engine.stats()
    (output,) = engine.generate([prompt], SamplingParams(n=3, max_tokens=1, prompt_logprobs=0))
    after = engine.stats()
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == prompt[1:]
    assert after.cached_tokens - before.cached_tokens == 2 * (len(prompt) - 1)


@pytest.mark.parametrize("start", [-1, 1.0, True, None, 2**31])
def test_a_start_of_prompt_logprobs_outside_the_prompt_is_refused(start):
    with pytest.raises(RequestError, match="prompt_logprobs_start"):
        SamplingParams(prompt_logprobs_start=start)


@pytest.mark.parametrize(
    ("params", "count"),
    [(SamplingParams(temperature=0, max_tokens=4, logprobs=0), 0), (SamplingParams(temperature=0, max_tokens=4), None)],
)
def test_logprobs_are_returned_only_on_request(engine, params, count):
    (output,) = engine.generate([CHAT], params)
    assert (output.logprobs is None) == (count is None)
    assert output.prompt_logprobs is None


def test_a_logit_bias_can_force_and_forbid_tokens(engine):
    (forced,) = engine.generate([CHAT], SamplingParams(temperature=0, max_tokens=3, logit_bias={300: 100.0}))
    assert set(forced.token_ids) == {300}
    (plain,) = engine.generate([CHAT], GREEDY)
    (without,) = engine.generate([CHAT], SamplingParams(temperature=0, logit_bias={plain.token_ids[0]: -100.0}))
    assert plain.token_ids[0] not in without.token_ids


def test_a_request_can_be_aborted_from_another_thread(engine):
    result = []
    thread = threading.Thread(target=lambda: result.extend(engine.generate(["go on"], LONG, request_ids=["mine"])))
    thread.start()
    wait_until(lambda: engine.stats().running_requests == 1)
    engine.abort("nobody")
    engine.abort("mine")
    thread.join(timeout=20)
    assert result[0].finish_reason is FinishReason.ABORT
    assert engine.stats().running_requests == 0


def test_leaving_a_stream_frees_its_request(engine):
    for output in engine.stream("go on", LONG):
        if len(output.token_ids) > 3:
            break
    wait_until(lambda: engine.stats().running_requests == 0)
    assert engine.stats().owned_pages == 0


def test_a_stream_dropped_before_its_first_output_frees_its_request(engine):
    stream = engine.stream("go on", LONG)
    del stream
    wait_until(lambda: engine.stats().running_requests == engine.stats().waiting_requests == 0)


def test_requests_during_a_close_end():
    engine = Engine(model="demo")
    ended = []

    def keep_asking():
        try:
            while True:
                engine.generate([[4, 5]], SamplingParams(max_tokens=3))
        except EngineClosedError:
            ended.append(True)

    threads = [threading.Thread(target=keep_asking, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.stats().finished_requests > 10)
    engine.close()
    for thread in threads:
        thread.join(timeout=20)
    assert len(ended) == 6


def test_a_request_is_aborted_after_its_timeout(engine):
    (output,) = engine.generate("go on", LONG, timeout_s=0.05)
    assert output.finish_reason is FinishReason.ABORT
    assert "timed out" in output.error


def test_a_second_request_with_the_same_id_is_refused(engine):
    stream = engine.stream("go on", LONG, request_id="twice")
    with pytest.raises(RequestError, match="'twice' is in use"):
        engine.generate("b", GREEDY, request_ids=["twice"])
    assert next(stream).finish_reason is None  # the first request with this id continues
    engine.abort("twice")
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    assert engine.generate("a", GREEDY, request_ids=["twice"])[0].finished


def test_a_cache_salt_separates_prompts(engine):
    engine.flush_cache()
    engine.generate([CHAT], GREEDY, cache_salt="tenant a")
    (other,) = engine.generate([CHAT], GREEDY, cache_salt="tenant b")
    (same,) = engine.generate([CHAT], GREEDY, cache_salt="tenant a")
    assert (other.usage.cached_tokens, same.usage.cached_tokens) == (0, same.usage.prompt_tokens - 1)


def test_flush_cache_removes_prefixes(engine):
    engine.generate([CHAT], GREEDY)
    assert engine.flush_cache() > 0
    assert engine.flush_cache() == 0
    assert engine.generate([CHAT], GREEDY)[0].usage.cached_tokens == 0


def test_stats_are_consistent(engine):
    before = engine.stats()
    engine.generate([CHAT, CHAT], GREEDY)
    after = engine.stats()
    assert after.finished_requests - before.finished_requests == 2
    assert after.steps > before.steps
    assert after.free_pages + after.evictable_pages + after.locked_pages + after.owned_pages == after.total_pages
    assert after.host_s > before.host_s


async def test_async_methods_return_the_same_outputs(engine):
    expected = engine.generate([CHAT, "a b c"], GREEDY)
    outputs = await engine.agenerate([CHAT, "a b c"], GREEDY)
    assert [o.text for o in outputs] == [o.text for o in expected]
    streamed = [output async for output in engine.astream(CHAT, GREEDY)]
    assert streamed[-1].text == expected[0].text
    assert len(streamed) > 2
    assert await engine.agenerate([], GREEDY) == []


async def test_many_async_streams_run_together(engine):
    async def one(i):
        async for output in engine.astream(f"{i} and", GREEDY):
            last = output
        return last.token_ids

    together = await asyncio.gather(*(one(i) for i in range(20)))
    assert together == [o.token_ids for o in engine.generate([f"{i} and" for i in range(20)], GREEDY)]


async def test_cancelling_an_async_call_frees_its_requests(engine):
    async def stream():
        async for _ in engine.astream("go on", LONG):
            pass

    for work in (stream(), engine.agenerate(["go on", "and on"], LONG)):
        task = asyncio.create_task(work)
        while engine.stats().running_requests == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.stats().running_requests:
            await asyncio.sleep(0.005)
    assert engine.stats().owned_pages == 0


def test_generate_accepts_more_prompts_than_the_queue_holds():
    with Engine(model="demo", scheduling={"max_queued_requests": 4, "max_running_requests": 2}) as engine:
        outputs = engine.generate([f"{i}" for i in range(40)], SamplingParams(temperature=0, max_tokens=2))
        assert len(outputs) == 40
        assert all(output.finished for output in outputs)
        with pytest.raises(QueueFullError):
            engine.generate("a", SamplingParams(n=8, max_tokens=2))


def test_prompts_of_one_call_are_queued_together(engine):
    engine.flush_cache()
    before = engine.stats()
    engine.generate([f"{i} prompt" for i in range(32)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert engine.stats().steps - before.steps <= 8


async def test_a_call_cancelled_before_it_is_queued_has_no_effect(engine):
    for _ in range(20):
        task = asyncio.create_task(engine.agenerate(["go on"] * 3, LONG))
        await asyncio.sleep(0.0005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await engine.agenerate([CHAT], GREEDY))[0].text == "The capital of France is Paris."
    while engine.stats().running_requests:
        await asyncio.sleep(0.005)


async def test_more_async_prompts_than_the_queue_holds_are_refused():
    with Engine(model="demo", scheduling={"max_queued_requests": 4}) as engine:
        with pytest.raises(QueueFullError, match="10 prompts exceed the maximum"):
            await engine.agenerate(["a"] * 10, GREEDY)
        assert len(await engine.agenerate(["a"] * 4, GREEDY)) == 4


def test_a_progress_bar_is_shown_on_request(engine, capsys):
    engine.generate(["a"] * 3, SamplingParams(max_tokens=1), progress=True)
    assert "generating" in capsys.readouterr().err
    engine.generate(["a"] * 40, SamplingParams(max_tokens=1))
    assert capsys.readouterr().err == ""


def test_close_ends_requests_and_refuses_new_ones():
    engine = Engine(model="demo")
    stream = engine.stream("go on", LONG)
    next(stream)
    engine.close()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.generate("a", GREEDY)


def test_an_unreferenced_engine_ends_its_threads():
    engine = Engine(model="demo")
    engine.generate("a", SamplingParams(max_tokens=2))
    alive = weakref.ref(engine)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("graftlm")]
    del engine
    gc.collect()
    assert alive() is None
    wait_until(lambda: sum(thread.is_alive() for thread in threads) <= len(threads) - 2)
