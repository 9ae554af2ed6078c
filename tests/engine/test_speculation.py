"""Speculation end to end: tokens, text, finish reasons and log-probabilities are those of plain decoding."""

import random
from unittest import mock

import numpy as np
import pytest

import graftlm_speculation
from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import Draft, Drafter, LogitsProcessor
from graftlm.errors import ConfigError
from graftlm.testing.drafter import AllDrafts

PROMPTS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Count from one to twenty."}],
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
#: Sampling parameters of every kind.
KINDS = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_p": 0.8},
    {"temperature": 0.8, "seed": 3, "top_k": 7, "min_p": 0.05},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 12},
    {"temperature": 0.8, "seed": 5, "logits_processors": {"not-twice": {}}},
    {"temperature": 0.8, "seed": 6, "n": 3, "logprobs": 2},
    {"temperature": 0, "stop": ["a", "3"], "logprobs": 0},
    {"temperature": 0, "json_schema": SCHEMA, "grammar_backend": "xgrammar"},
    {"temperature": 0.8, "seed": 7, "regex": "[A-Z][a-z ]{3,30}[.]", "grammar_backend": "llguidance"},
    {"temperature": 0.8, "seed": 8, "regex": "(ab|cd|[0-9]){4,12}", "grammar_backend": "outlines"},
    {"temperature": 0.8, "seed": 9, "json_schema": SCHEMA, "jump_forward": False, "logprobs": 1},
    {"temperature": 0.8, "seed": 10, "speculation": False},
)
PARAMS = [SamplingParams(max_tokens=40, **kind) for kind in KINDS]
#: (cache, page size, prefill tokens per step, overlap, jump_forward, KV memory in tokens)
CASES = [
    ("radix", 1, 2048, True, "exact", 20_000),
    ("radix", 16, 7, False, "fast", 20_000),
    ("chunk", 4, 64, True, False, 20_000),
    ("radix", 4, 2048, True, "fast", 400),
]


class NotTwice(LogitsProcessor):
    """Forbids the latest token."""

    def process(self, output_token_ids, logits):
        if len(output_token_ids):
            logits[output_token_ids[-1]] = -np.inf
        return logits


class Replay(Drafter):
    """Drafts what earlier requests generated after the same tokens, with mistakes."""

    def __init__(self, texts, seed):
        self.texts = texts
        self.random = random.Random(seed)

    def propose(self, requests):
        return [self.draft(request) for request in requests]

    def draft(self, request):
        done = len(request.token_ids)
        fits = [t for t in self.texts if len(t) > done and np.array_equal(t[:done], request.token_ids)]
        if not fits:
            return None
        token_ids = self.random.choice(fits)[done : done + self.random.randint(1, request.limit)].copy()
        if self.random.random() < 0.3:
            token_ids[self.random.randrange(len(token_ids))] = self.random.randrange(300)
        return Draft(token_ids, 0.9)


class Eager(Drafter):
    """The drafter `eagle3`, which the engine calls for each step, because its costs are not declared."""

    drafts_ahead = False
    num_page_tokens = 4

    def __init__(self, inner):
        self.inner = inner

    def propose(self, requests):
        return self.inner.propose(requests)


def create_eager(options, context):
    (eagle3,) = [one for one in graftlm_speculation.provide_drafters() if one.name == "eagle3"]
    return Eager(eagle3.create(eagle3.options(path="demo-eagle3", max_drafts=4), context))


class Plugin:
    """Provides the processor and the drafters; `texts` are what the drafter `replay` replays."""

    def __init__(self):
        self.texts = []

    @hookimpl
    def provide_logits_processors(self):
        return [provider("not-twice", lambda options, context: NotTwice())]

    @hookimpl
    def provide_drafters(self):
        return [provider("replay", lambda options, context: Replay(self.texts, 0)), provider("eager", create_eager)]


def provider(name, create):
    return Provider(name=name, summary="For these tests", api_version=1, create=create)


def facts(outputs):
    return [
        (c.token_ids, c.text, c.finish_reason, c.matched_stop, c.error, ids_of(c.logprobs))
        for output in outputs
        for c in output.completions
    ]


def ids_of(logprobs):
    return None if logprobs is None else [(one.token_id, [token for token, _ in one.top]) for one in logprobs]


def texts_of(outputs):
    """Return prompt and output of each completion, int32."""
    return [np.array([*o.prompt_token_ids, *c.token_ids], dtype=np.int32) for o in outputs for c in o.completions]


def values_of(outputs):
    return np.array([one.logprob for o in outputs for c in o.completions for one in c.logprobs or ()])


def verifying_all(config, plugins=(graftlm_speculation,)):
    """Return an engine that verifies all drafts, so that the number of drafts does not depend on measured times."""
    with mock.patch("graftlm.speculation.speculator.DraftBudget", lambda costs, max_drafts: AllDrafts(max_drafts)):
        return Engine(config, plugins=list(plugins))


def run(plugin, drafter, prompts, params, rounds=1, **sections):
    """Return the outputs of each round, and the numbers of drafted and accepted tokens. All drafts are verified."""
    plugins = [plugin, graftlm_speculation]
    with verifying_all({"speculation": drafter, "debug": True, **sections}, plugins) as engine:
        outputs = [engine.generate(prompts, params) for _ in range(rounds)]
        drafts = engine.stats().drafts.values()
        return outputs, sum(drafted for drafted, _ in drafts), sum(accepted for _, accepted in drafts)


def assert_same(drafter, prompts, params, rounds=1, **sections):
    plugin = Plugin()
    (plain,), *_ = run(plugin, None, prompts, params, **sections)
    plugin.texts = texts_of(plain)
    speculated, drafted, accepted = run(plugin, drafter, prompts, params, rounds, **sections)
    for outputs in speculated:
        assert facts(outputs) == facts(plain)
        np.testing.assert_allclose(values_of(outputs), values_of(plain), atol=1e-4)
    assert drafted > accepted > (8 if drafter == "eager" else 15)


@pytest.mark.parametrize("drafter", ["replay", "auto", "eager"])
@pytest.mark.parametrize(("cache", "page_size", "chunk", "overlap", "jump_forward", "kv_tokens"), CASES)
@pytest.mark.covering(strength=1)
def test_output_is_that_of_plain_decoding(
    monkeypatch, drafter, cache, page_size, chunk, overlap, jump_forward, kv_tokens
):
    if drafter == "eager":  # verify every draft of the head, whatever the measured times are
        budget = "graftlm.speculation.speculator.DraftBudget"
        monkeypatch.setattr(budget, lambda costs, max_drafts: AllDrafts(max_drafts))
    sections = {
        "model": {"path": "demo", "dtype": "float32"},
        "cache": {"name": cache, "page_size": page_size},
        "scheduling": {"prefill_tokens_per_step": chunk, "overlap": overlap},
        "grammar": {"jump_forward": jump_forward},
        "memory": {"kv_tokens": kv_tokens},
    }
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    params = [one for _ in PROMPTS for one in PARAMS]
    assert_same(drafter, prompts, params, rounds=1 if drafter == "replay" else 2, **sections)


def test_the_first_drafters_are_called_before_the_last():
    plugin, params = Plugin(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (plain,), *_ = run(plugin, None, PROMPTS[:2], params)
    plugin.texts = texts_of(plain)[:1]
    drafts = {}
    for first, last in (("replay", "suffix"), ("suffix", "replay")):
        with Engine(
            {"speculation": {"first": [first], "drafter": last}}, plugins=[plugin, graftlm_speculation]
        ) as engine:
            assert facts(engine.generate(PROMPTS[:2], params)) == facts(plain)
            drafts[first] = engine.stats().drafts
    assert list(drafts["replay"]) == ["replay", "suffix"]
    assert list(drafts["suffix"]) == ["suffix", "replay"]
    assert drafts["replay"]["replay"] > drafts["suffix"]["replay"]
    assert drafts["replay"]["suffix"] < drafts["suffix"]["suffix"]
    with pytest.raises(ConfigError, match=r"speculation\.first: draft_model needs the option path, but"):
        Engine({"speculation": {"first": ["draft_model"], "drafter": "suffix"}}, plugins=[graftlm_speculation])


def test_output_is_that_of_plain_decoding_with_adapters(adapters):
    lora = {"adapters": {"a": str(adapters.folders["attention"])}, "max_rank": 8}
    sections = {"model": str(adapters.base), "lora": lora, "memory": {"kv_tokens": 2048}}
    plugin = Plugin()
    prompts, params = [[5, 6, 7], [8, 9]] * 2, SamplingParams(temperature=0, max_tokens=30)
    results = []
    for drafter in (None, "replay"):
        with Engine({"speculation": drafter, "debug": True, **sections}, plugins=[plugin]) as engine:
            outputs = engine.generate(prompts, params, adapter=["a", None, None, "a"])
            drafts = engine.stats().drafts
        results.append(facts(outputs))
        plugin.texts = texts_of(outputs)
    assert results[0] == results[1]
    assert drafts["replay"][1] > 10


def test_an_answer_is_drafted_from_another_conversation_of_the_namespace():
    """The prompts differ in their first tokens, so they share no prefix."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    questions = [PROMPTS[0], [{"role": "user", "content": "Hello. What is the capital of France?"}]]
    speculation = {"drafter": {"name": "suffix", "options": {"min_match_tokens": 16}}}
    accepted = {}
    with verifying_all({"speculation": speculation, "model": "demo"}) as engine:
        for salt, question in ((salt, question) for salt in ("", "another tenant") for question in questions):
            (output,) = engine.generate([question], params, cache_salt=salt)
            accepted.setdefault(salt, []).append((output.token_ids, output.usage.accepted_draft_tokens))
    for (first, num_first), (second, num_second) in accepted.values():
        assert first == second
        assert num_first < 10 < num_second


@pytest.mark.parametrize("overlap", [False, True])
def test_a_regenerated_answer_is_drafted_from_the_prefix_cache(overlap):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sections = {"model": "demo", "scheduling": {"overlap": overlap}}
    with verifying_all({"speculation": "radix", **sections}) as engine:
        first = engine.generate(PROMPTS[:1], params)[0]
        num_steps = engine.stats().steps
        second = engine.generate(PROMPTS[:1], params)[0]
        assert second.token_ids == first.token_ids
        assert engine.stats().steps - num_steps < 20
        assert second.usage.accepted_draft_tokens > 40
        other = engine.generate(PROMPTS[:1], params, cache_salt="another tenant")[0]
        assert other.token_ids == first.token_ids
        assert other.usage.drafted_tokens == 0
