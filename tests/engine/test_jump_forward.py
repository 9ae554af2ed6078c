"""With jump-forward, each sampled token is the choice of Transformers after the same tokens."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
import transformers

from graftlm import Engine, FinishReason, SamplingParams
from graftlm.checkpoint import load_model_config
from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm.errors import SamplingParamsError
from graftlm.speculation import speculator
from graftlm.testing.drafter import AllDrafts
from graftlm.tokenization import Tokenizer
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

SUMMARY = r'\{"summary": "[A-Za-z ]{1,40}", "grade": "[ABCD][+\-]?"\}'
RECORD = r"\{" + ", ".join(f'"key_{i:02}": [1-9][0-9]?' for i in range(20)) + r"\}"
CHOICE = "(The capital of France is Paris|The capital of Norway is Oslo|I do not know)[.]"
PLACES = r"Places: (Oslo|Paris|Lima|Quito)(, (Oslo|Paris|Lima|Quito)){2,4}\."
REGEXES = (SUMMARY, RECORD, CHOICE, PLACES)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "people": {"type": "integer", "minimum": 0}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
)
EBNF = 'root ::= "The answer is " ("yes" | "no") ", and the reason is that " [a-z ]{5,20} "."'
PROMPTS = ("What is the capital of France?", "Count: one, two, three,", "x")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint("demo"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("demo"), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def backend(checkpoint, tokenizer):
    config = load_model_config(checkpoint("demo"))
    context = GrammarContext(tokenizer.to_json(), config.vocab_size, config.eos_token_ids)
    return XGrammarBackend(XGrammarOptions(), context)


def generate(jump_forward, overlap, prompts, params, **config):
    """Return outputs, and the number of steps."""
    settings = {"scheduling": {"overlap": overlap} | config.pop("scheduling", {}), **config}
    with Engine(
        model={"path": "demo", "dtype": "float32"}, grammar={"jump_forward": jump_forward}, **settings
    ) as engine:
        outputs = engine.generate(prompts, params)
        return outputs, engine.stats().steps


def assert_masked_choices(reference, backend, kind, spec, output):
    """Assert that every token is the most likely one that the grammar allows after the previous tokens."""
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float().numpy()
    matcher = backend.compile(GrammarSpec(GrammarKind(kind), spec)).matcher()
    mask = np.zeros((1, -(-logits.shape[1] // 32)), dtype=np.int32)
    for scores, token_id in zip(logits, tokens, strict=True):
        matcher.fill_bitmask(mask, 0)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: len(scores)].astype(bool)
        assert token_id == int(np.where(allowed, scores, -np.inf).argmax())
        assert matcher.accept(token_id)


def assert_own_choices(reference, tokenizer, backend, regex, output):
    """Assert that every token is the most likely allowed one, or begins with it, or is forced."""
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float().numpy()
    matcher = backend.compile(GrammarSpec(GrammarKind.REGEX, regex)).matcher()
    mask = np.zeros((1, -(-logits.shape[1] // 32)), dtype=np.int32)
    for scores, token_id in zip(logits, tokens, strict=True):
        matcher.fill_bitmask(mask, 0)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: len(scores)].astype(bool)
        best = int(np.where(allowed, scores, -np.inf).argmax())
        if token_id != best:  # this token replaces the model's choice and the text that was forced after it
            said = tokenizer.decode([token_id])
            is_forced = matcher.forced_text().startswith(said)
            assert is_forced or said.startswith(tokenizer.decode([best])), tokenizer.decode(tokens)
        assert matcher.accept(token_id)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("overlap", "page_size", "chunk", "cache"),
    [(False, 1, 2048, "radix"), (True, 16, 7, "radix"), (True, 1, 64, "chunk"), (False, 16, 7, "chunk")],
)
def test_greedy_choices_equal_those_of_transformers(reference, tokenizer, backend, overlap, page_size, chunk, cache):
    cases = list(itertools.product(PROMPTS, REGEXES))
    params = [SamplingParams(temperature=0, max_tokens=400, regex=regex) for _, regex in cases]
    outputs, _ = generate(
        "fast",
        overlap,
        [prompt for prompt, _ in cases],
        params,
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk},
        memory={"kv_tokens": 1024},
        debug=True,
    )
    for (_, regex), output in zip(cases, outputs, strict=True):
        assert output.finish_reason is FinishReason.STOP
        assert re.fullmatch(regex, output.text)
        assert output.usage.jump_forward_tokens > 0
        assert_own_choices(reference, tokenizer, backend, regex, output)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_request_without_jump_forward_has_the_text_of_masks_alone(reference, backend, overlap, monkeypatch):
    # Which drafts are verified must not depend on measured times.
    monkeypatch.setattr(speculator, "DraftBudget", lambda costs, max_drafts: AllDrafts(max_drafts))
    cases = [("regex", regex) for regex in REGEXES] + [("json_schema", SCHEMA), ("ebnf", EBNF)]
    prompts = [prompt for prompt in PROMPTS for _ in cases]
    cases *= len(PROMPTS)

    def params(**more):
        return [SamplingParams(temperature=0, max_tokens=300, **{kind: spec}, **more) for kind, spec in cases]

    asked = [
        *params(jump_forward=False),
        *params(jump_forward=False, logprobs=0),
        *params(jump_forward=True, logprobs=2),
        *params(jump_forward=True),
    ]
    outputs, _ = generate("fast", overlap, prompts * 4, asked)
    num = len(cases)
    alone, with_logprobs, jumping_with_logprobs, jumping = (outputs[i : i + num] for i in range(0, 4 * num, num))
    assert [one.token_ids for one in alone] == [one.token_ids for one in with_logprobs]
    assert [one.token_ids for one in alone] == [one.token_ids for one in jumping_with_logprobs]
    assert [one.text for one in alone] != [one.text for one in jumping]
    assert not any(one.usage.jump_forward_tokens for one in alone + with_logprobs + jumping_with_logprobs)
    assert all(one.usage.jump_forward_tokens for one in jumping)
    for (kind, spec), output in zip(cases, alone, strict=True):
        assert_masked_choices(reference, backend, kind, spec, output)

    exact, num_steps = generate("exact", overlap, prompts, params(logprobs=1), debug=True)
    plain, num_plain_steps = generate(False, overlap, prompts, params(logprobs=1))
    assert [one.token_ids for one in exact] == [one.token_ids for one in alone] == [one.token_ids for one in plain]
    for one, other in zip(exact, plain, strict=True):
        values = [[token.logprob for token in output.logprobs] for output in (one, other)]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    assert all(one.usage.accepted_draft_tokens for one in exact)
    assert num_steps < num_plain_steps


def test_a_request_cannot_switch_jump_forward_on():
    params = SamplingParams(temperature=0, max_tokens=60, regex=SUMMARY, jump_forward=True)
    (output,), _ = generate(False, False, PROMPTS[:1], params)
    assert output.usage.jump_forward_tokens == 0


@pytest.mark.parametrize("value", [0, "false", 1.0])
def test_jump_forward_must_be_a_boolean_or_none(value):
    with pytest.raises(SamplingParamsError, match="jump_forward must be true, false or None"):
        SamplingParams(regex="a", jump_forward=value)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("regex", [SUMMARY, RECORD])
def test_jump_forward_reduces_forward_passes(overlap, regex, monkeypatch):
    # Which drafts are verified must not depend on measured times.
    monkeypatch.setattr(speculator, "DraftBudget", lambda costs, max_drafts: AllDrafts(max_drafts))
    params = SamplingParams(temperature=0, max_tokens=400, regex=regex)
    steps = {jump: generate(jump, overlap, PROMPTS[:1], params)[1] for jump in (False, "fast", "exact")}
    assert steps[False] > 1.6 * steps["fast"], steps
    assert steps[False] > 1.3 * steps["exact"], steps


@pytest.mark.parametrize("regex", [RECORD, CHOICE, PLACES])
def test_output_tokens_equal_the_encoding_of_their_text(tokenizer, regex):
    outputs, _ = generate("fast", False, PROMPTS, SamplingParams(temperature=0, max_tokens=400, regex=regex))
    for output in outputs:
        assert list(output.token_ids[:-1]) == tokenizer.encode_inside(output.text)


def test_cached_prompt_tokens_count_although_text_is_forced_before_the_prefill():
    params = SamplingParams(temperature=0, max_tokens=400, regex=SUMMARY)
    prompt = " ".join(PROMPTS * 3)
    with Engine(model="demo", grammar={"jump_forward": "fast"}) as engine:
        usages = [engine.generate(prompt, params)[0].usage for _ in range(2)]
    assert usages[0].cached_tokens == 0
    assert usages[1].cached_tokens == usages[1].prompt_tokens


def test_forced_text_is_streamed_before_anything_is_sampled():
    with Engine(model="demo", grammar={"jump_forward": "fast"}) as engine:
        texts = [output.text for output in engine.stream("x", SamplingParams(max_tokens=60, regex=SUMMARY, seed=1))]
    assert texts[0].startswith('{"summary":')
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert re.fullmatch(SUMMARY, texts[-1])
