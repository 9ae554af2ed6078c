"""Constrained decoding end to end, on the bundled model."""

import json
import math
import re
import threading
from itertools import pairwise

import jsonschema
import pydantic
import pytest

from graftlm import Engine, FinishReason, Options, Provider, SamplingParams, hookimpl
from graftlm.contracts import CompiledGrammar, GrammarBackend
from graftlm.errors import GrammarError, UnsupportedFeatureError
from graftlm.testing import FakeGrammarBackend

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
FREE = SamplingParams(max_tokens=3, ignore_eos=True)
ANA = [{"role": "user", "content": "Write a JSON record for Ana, age 31, city Lima"}]

SCHEMAS = [
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "boolean"},
    {"enum": ["red", "green", "é", None, 3]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,9}(?: [A-Z][a-z]+)?$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
]
REGEXES = [
    r"\d{3}-\d{4}",
    r"(yes|no|maybe)",
    r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    r"[A-Z][a-z]+( [A-Z][a-z]+){0,2}",
    r"(\([^()\n]{0,6}\)){1,3}",
    r"-?\d+(\.\d{1,2})?",
]
EBNFS = [
    ('root ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" root ")"', r"[0-9+()]+"),
    ('root ::= "The answer is " ("yes" | "no") "."', r"The answer is (yes|no)\."),
]
CASES = [("json_schema", schema) for schema in SCHEMAS] + [("regex", regex) for regex in REGEXES]
CASES += [("ebnf", ebnf) for ebnf, _ in EBNFS]
SEEDS = (1, 2, 3)


def is_valid(kind, spec, text):
    if kind == "json_schema":
        checker = jsonschema.FormatChecker(["date"])
        return jsonschema.Draft202012Validator(spec, format_checker=checker).is_valid(json.loads(text))
    return re.fullmatch(spec if kind == "regex" else dict(EBNFS)[spec], text) is not None


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", debug=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_engine():
    """The same engine without overlap."""
    with Engine(model="demo", scheduling={"overlap": False}, debug=True) as engine:
        yield engine


def mixed_batch():
    """Return prompts and parameters; each constrained request is between two free ones."""
    prompts, params = [], []
    for number, (kind, spec) in enumerate(CASES):
        for seed in SEEDS:
            prompts += [f"Case {number}:", "The capital of France is"]
            params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=48, **{kind: spec}))
            params.append(SamplingParams(temperature=1.0, seed=100 * number + seed, max_tokens=12))
    return prompts, params


@pytest.fixture(scope="module")
def mixed(engine):
    return engine.generate(*mixed_batch())


def test_every_output_that_ends_is_valid(mixed):
    ended = 0
    for i, (kind, spec) in enumerate(case for case in CASES for _ in SEEDS):
        completion = mixed[2 * i].completions[0]
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), completion.error
        if completion.finish_reason is FinishReason.STOP:
            ended += 1
            assert is_valid(kind, spec, completion.text), (spec, completion.text)
        else:
            assert len(completion.token_ids) == 48
    assert ended >= 0.8 * len(CASES) * len(SEEDS)


def test_free_requests_are_not_affected_by_constrained_ones(engine, mixed):
    prompts, params = mixed_batch()
    alone = engine.generate(prompts[1::2], params[1::2])
    assert [output.token_ids for output in alone] == [output.token_ids for output in mixed[1::2]]


def test_tokens_are_the_same_without_overlap(plain_engine, mixed):
    other = plain_engine.generate(*mixed_batch())
    assert [output.token_ids for output in other] == [output.token_ids for output in mixed]
    assert [output.finish_reason for output in other] == [output.finish_reason for output in mixed]


def test_a_json_record_matches_its_schema(engine):
    (output,) = engine.generate([ANA], SamplingParams(temperature=0, max_tokens=64, json_schema=RECORD))
    assert json.loads(output.text) == {"name": "Ana", "age": 31, "city": "Lima"}
    assert output.finish_reason is FinishReason.STOP
    assert output.matched_stop in engine.model_config.eos_token_ids


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str | None


def test_a_pydantic_model_and_a_text_are_accepted_as_schemas(engine):
    greedy = {"temperature": 0, "max_tokens": 64}
    by_class, by_text = engine.generate(
        [ANA, ANA],
        [
            SamplingParams(json_schema=Person, **greedy),
            SamplingParams(json_schema=json.dumps(Person.model_json_schema()), **greedy),
        ],
    )
    assert Person.model_validate_json(by_class.text).name == "Ana"
    assert by_text.token_ids == by_class.token_ids


def test_an_output_cut_short_has_finish_reason_length(engine):
    params = SamplingParams(temperature=0, max_tokens=5, json_schema=RECORD)
    (output,) = engine.generate([ANA], params)
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 5


def test_a_grammar_ends_the_output_despite_ignore_eos_and_min_tokens(engine):
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, min_tokens=30, ignore_eos=True, regex="ab?c")
    (output,) = engine.generate(["x"], params)
    assert output.finish_reason is FinishReason.STOP
    assert re.fullmatch("ab?c", output.text)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {5: 500.0, 6: -500.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 20.0, "top_p": 0.3},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
    ],
)
def test_other_parameters_do_not_break_the_grammar(engine, params):
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "regex": r"\d{4}(-\d\d){2}", "n": 3} | params
    (output,) = engine.generate(["The date is"], SamplingParams(**params))
    for completion in output.completions:
        assert re.fullmatch(r"\d{4}(-\d\d){2}", completion.text)


def test_completions_of_one_prompt_are_constrained_independently(engine):
    params = SamplingParams(temperature=2, seed=1, max_tokens=60, n=6, regex="[a-z]{4,8}")
    (output,) = engine.generate(["x"], params)
    texts = [completion.text for completion in output.completions]
    assert all(re.fullmatch("[a-z]{4,8}", text) for text in texts)
    assert len(set(texts)) > 3


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_masked_logprobs_are_normalized_over_the_allowed_tokens(engine, temperature):
    words = ["red", "reddish", "blue"]
    shared = {"temperature": temperature, "seed": 1, "logprobs": 20, "max_tokens": 8, "choice": words}
    plain, masked = engine.generate([ANA, ANA], [SamplingParams(**shared, masked_logprobs=on) for on in (False, True)])
    assert masked.token_ids == plain.token_ids
    encode = engine.tokenizer.encode
    allowed_first = {
        int(encode(word[:n], add_special_tokens=False)[0]) for word in words for n in range(1, len(word) + 1)
    }
    assert {token_id for token_id, _ in masked.logprobs[0].top} <= allowed_first
    for one, unmasked in zip(masked.logprobs, plain.logprobs, strict=True):
        assert sum(math.exp(value) for _, value in one.top) == pytest.approx(1, abs=1e-4)
        top, model = dict(one.top), dict(unmasked.top)
        assert top[one.token_id] == pytest.approx(one.logprob)
        both = [token_id for token_id in top if token_id in model]
        shifts = [top[token_id] - model[token_id] for token_id in both]
        assert shifts == pytest.approx([shifts[0]] * len(both), abs=1e-4) if both else True
        assert one.logprob >= unmasked.logprob - 1e-5
    forbidden = SamplingParams(**shared | {"logprob_token_ids": [0], "logprobs": 0}, masked_logprobs=True)
    assert engine.generate([ANA], forbidden)[0].logprobs[0].requested == (-math.inf,)


def test_logprobs_are_those_of_the_unconstrained_model(engine):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, regex="zzz")
    engine.flush_cache()
    (bound,) = engine.generate(["The capital of France is"], params)
    engine.flush_cache()  # with a cached prefix only one token is computed, which is rounded differently
    (free,) = engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    assert bound.completions[0].logprobs[0].top == free.completions[0].logprobs[0].top
    assert bound.completions[0].logprobs[0].logprob < free.completions[0].logprobs[0].logprob


def test_a_stream_grows_to_a_valid_text(engine):
    texts = [output.text for output in engine.stream(ANA, SamplingParams(max_tokens=64, json_schema=RECORD, seed=1))]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    jsonschema.validate(json.loads(texts[-1]), RECORD)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, r"json_schema: \$\.uniqueItems: this keyword"),
        ({"json_schema": "{"}, "json_schema: not JSON"),
        ({"regex": "(a"}, "regular expression"),
        ({"ebnf": "root ::= x"}, "ebnf: "),
    ],
)
def test_an_unenforceable_specification_is_refused_before_any_step(engine, params, said):
    steps = engine.stats().steps
    with pytest.raises(GrammarError, match=said):
        engine.generate(["a", "b"], [SamplingParams(), SamplingParams(**params)])
    with pytest.raises(GrammarError, match=said):
        engine.stream("a", SamplingParams(**params))
    assert engine.stats().steps == steps


class DeadEndPlugin:
    """Offers `fake`, whose grammars can reach a state in which no token is allowed."""

    @hookimpl
    def provide_grammar_backends(self):
        def create(options, context):
            return FakeGrammarBackend.of(context)

        return [Provider(name="fake", summary="For tests", api_version=1, create=create, options=Options)]


def test_a_grammar_without_a_next_token_fails_only_its_request():
    with Engine(model="demo", grammar={"name": "fake"}, plugins=[DeadEndPlugin()]) as engine:
        bound, free = engine.generate(["a", "a"], [SamplingParams(ebnf="a a"), FREE])
    assert bound.finish_reason is FinishReason.ERROR
    assert "no token is allowed next" in bound.completions[0].error
    assert free.finish_reason is FinishReason.LENGTH


def test_a_grammar_without_a_next_token_leaves_the_prompt_cached():
    prompt = list(range(10, 74))
    with Engine(model="demo", grammar={"name": "fake"}, plugins=[DeadEndPlugin()]) as engine:
        engine.generate([prompt], FREE)
        (bound,) = engine.generate([prompt], SamplingParams(ebnf="a a"))
        (after,) = engine.generate([prompt], FREE)
    assert bound.finish_reason is FinishReason.ERROR
    assert after.usage.cached_tokens == len(prompt) - 1


def test_a_tokenizer_that_fails_in_jump_forward_fails_only_its_request(caplog):
    with Engine(model="demo") as engine:
        engine.tokenizer.encode_inside = lambda text: [][0]
        bound, free = engine.generate(["a", "a"], [SamplingParams(regex="a long forced text"), FREE])
    assert "jump-forward failed: IndexError" in bound.completions[0].error
    assert free.finish_reason is FinishReason.LENGTH
    assert "jump-forward failed; its request ends" in caplog.text


def test_an_engine_without_a_grammar_backend_refuses_grammars():
    with Engine({"model": "demo", "plugins": {"disabled": ["grammar"]}}) as engine:
        with pytest.raises(UnsupportedFeatureError, match=r"^regex: this engine has no grammar backend"):
            engine.generate("a", SamplingParams(regex="a"))
        assert engine.generate("a", FREE)[0].finish_reason is FinishReason.LENGTH


class Stuck(GrammarBackend):
    """Compiles when its gate opens."""

    def __init__(self, gate):
        self.gate = gate

    def check(self, spec):
        pass

    def compile(self, spec):
        self.gate.wait(60)
        return CompiledGrammar


class StuckPlugin:
    """Offers `stuck`, and counts how often it is created."""

    def __init__(self):
        self.gate = threading.Event()
        self.num_created = 0

    def create(self, options, context):
        self.num_created += 1
        return Stuck(self.gate)

    @hookimpl
    def provide_grammar_backends(self):
        return [Provider(name="stuck", summary="For tests", api_version=1, create=self.create, options=Options)]


def test_a_late_grammar_fails_its_request_and_the_backend_is_created_on_first_use():
    plugin = StuckPlugin()
    with Engine(model="demo", grammar={"name": "stuck", "timeout_s": 0.2}, plugins=[plugin]) as engine:
        engine.generate("a", FREE)
        assert plugin.num_created == 0
        bound, free = engine.generate(["a", "a"], [SamplingParams(regex="a"), FREE])
        assert bound.finish_reason is FinishReason.ERROR
        assert "was not compiled in time" in bound.completions[0].error
        assert free.finish_reason is FinishReason.LENGTH
        assert plugin.num_created == 1
        aborted = engine.generate("a", SamplingParams(regex="a"), timeout_s=0.05)[0]
        assert aborted.finish_reason is FinishReason.ABORT
    plugin.gate.set()
