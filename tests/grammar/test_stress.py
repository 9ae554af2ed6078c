"""For every grammar backend, outputs stay valid under chunks, retractions, aborts and stop strings."""

import itertools
import json
import re

import jsonschema
import pytest

from graftlm import Engine, FinishReason, SamplingParams
from graftlm.registry import Registry

BACKENDS = sorted(Registry.load().names("grammar"))
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 999},
        "kind": {"enum": ["apple", "apricot", "pear"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "kind", "tags", "ok"],
    "additionalProperties": False,
}
LINE = r"id: [0-9]{3}; name: (Ana|Bob|Cleo) [A-Z]{2,5}\.( Again: [a-c]{3}\.)?"
WORDS = ("red", "reddish", "green and blue", "grün")


def is_valid(params, text):
    if params.json_schema is not None:
        return jsonschema.Draft202012Validator(ITEM).is_valid(json.loads(text))
    return re.fullmatch(LINE, text) if params.regex is not None else text in WORDS


def requests(backend, num, **more):
    """Return prompts with long common prefixes, and parameters of all kinds."""
    kinds = itertools.cycle([{"json_schema": ITEM}, {"regex": LINE}, {"choice": WORDS}])
    prompts = [f"{'The list is long. ' * 4}Number {i}:" for i in range(num)]
    params = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=150, grammar_backend=backend, **kind, **more)
        for i, kind in zip(range(num), kinds, strict=False)
    ]
    return prompts, params


def assert_valid(outputs, params, least_ended):
    ended = 0
    for output, asked in zip(outputs, params, strict=True):
        for completion in output.completions:
            assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), completion.error
            if completion.finish_reason is FinishReason.STOP:
                assert is_valid(asked, completion.text), completion.text
                ended += 1
    assert ended >= least_ended


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("overlap", "page_size", "chunk", "kv_tokens", "jump_forward"),
    [(False, 1, 16, 190, True), (True, 16, 16, 272, True), (True, 1, 64, 260, False)],
)
def test_outputs_are_valid_with_chunks_and_retractions(backend, overlap, page_size, chunk, kv_tokens, jump_forward):
    prompts, params = requests(backend, 24)
    with Engine(
        model="demo",
        cache={"page_size": page_size},
        scheduling={"overlap": overlap, "prefill_tokens_per_step": chunk},
        memory={"kv_tokens": kv_tokens},
        grammar={"jump_forward": jump_forward},
        debug=True,
    ) as engine:
        engine.generate(prompts[:3], params[:3])  # compiles the grammars, so that all later requests start at once
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    assert_valid(outputs, params, least_ended=20)
    assert stats.retractions > 0
    assert stats.owned_pages == stats.locked_pages == 0


@pytest.mark.few(backend=1)  # the first test has all backends
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_valid_with_several_completions(backend):
    prompts, params = requests(backend, 6, n=4)
    with Engine(model="demo", debug=True) as engine:
        outputs = engine.generate(prompts, params)
    assert_valid(outputs, params, least_ended=20)
    assert any(len({completion.text for completion in output.completions}) > 1 for output in outputs)


@pytest.mark.few(backend=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_within_a_json_string_ends_the_output(backend, overlap):
    prompts, params = requests(backend, 12, stop=['"tags": ["', "name:", "green"])
    with Engine(model="demo", scheduling={"overlap": overlap}, debug=True) as engine:
        outputs = engine.generate(prompts, params)
    stopped = [output for output in outputs if isinstance(output.completions[0].matched_stop, str)]
    assert stopped
    for output in stopped:
        assert output.completions[0].matched_stop not in output.text
    others = [(output, asked) for output, asked in zip(outputs, params, strict=True) if output not in stopped]
    assert_valid([output for output, _ in others], [asked for _, asked in others], least_ended=0)


@pytest.mark.few(backend=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_aborted_requests_do_not_affect_their_neighbours(backend, overlap):
    prompts, params = requests(backend, 12)
    with Engine(model="demo", scheduling={"overlap": overlap}, debug=True) as engine:
        alone = [engine.generate(prompts[i], params[i])[0].token_ids for i in range(0, 12, 4)]
        engine.flush_cache()
        streams = [engine.stream(prompt, asked) for prompt, asked in zip(prompts, params, strict=True)]
        first = [next(stream) for stream in streams]
        for i, output in enumerate(first):
            if i % 4:
                engine.abort(output.request_id)
        last = [list(stream)[-1] if not first[i].finished else first[i] for i, stream in enumerate(streams)]
        assert [last[i].token_ids for i in range(0, 12, 4)] == alone
        stats = engine.stats()
    assert_valid([last[i] for i in range(0, 12, 4)], params[::4], least_ended=2)
    assert stats.owned_pages == stats.locked_pages == 0
