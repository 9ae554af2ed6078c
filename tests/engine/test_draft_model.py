"""A draft model: the output is that of plain decoding, and a draft model that is the served one is always right."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

import graftlm_speculation
from graftlm import Engine, SamplingParams, hookimpl
from graftlm.errors import ConfigError
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.types import FinishReason

PROMPTS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a JSON record for Ana, age 31, city Lima."}],
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
GREEDY = (
    {},
    {"ignore_eos": True, "logprobs": 1},
    {"json_schema": SCHEMA, "grammar_backend": "xgrammar"},
    {"regex": "[A-Z][a-z ]{3,30}[.]", "grammar_backend": "llguidance"},
    {"max_tokens": 3},
    {"speculation": False},
)
SAMPLED = ({"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2, "top_p": 0.9, "n": 2})


def params_of(kinds):
    return [SamplingParams(**({"max_tokens": 40, "temperature": 0} | kind)) for kind in kinds]


def draft_model(path="demo", **options):
    return {"drafter": {"name": "draft_model", "options": {"path": str(path), **options}}}


def facts(outputs):
    return [
        (c.token_ids, c.text, c.finish_reason, None if c.logprobs is None else [one.token_id for one in c.logprobs])
        for output in outputs
        for c in output.completions
    ]


class Abort:
    """Aborts the request "aborted" when it sees a step."""

    def __init__(self, step_id):
        self.engine = None
        self._step_id = step_id

    @hookimpl
    def step_finished(self, record):
        if record.step_id == self._step_id:
            self.engine.abort("aborted")


def run(speculation, params, **sections):
    """Return the facts of all prompts with all parameters, and the numbers of drafted and accepted tokens.

    A further request is aborted while these run.
    """
    sections = {"model": {"path": "demo", "dtype": "float32"}, "debug": True} | sections
    abort = Abort(step_id=9)
    with Engine({"speculation": speculation, **sections}, plugins=[graftlm_speculation, abort]) as engine:
        abort.engine = engine
        prompts = [PROMPTS[2], *(prompt for prompt in PROMPTS for _ in params)]
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        ids = ["aborted", *map(str, range(1, len(prompts)))]
        aborted, *outputs = engine.generate(prompts, [long, *params * len(PROMPTS)], request_ids=ids)
        assert aborted.finish_reason is FinishReason.ABORT
        assert aborted.token_ids
        return facts(outputs), *engine.stats().drafts.get("draft_model", (0, 0))


@pytest.fixture(scope="module")
def plain():
    """What plain decoding yields."""
    exact = {"grammar": {"jump_forward": False}}
    return {name: run(None, params_of(kinds), **exact)[0] for name, kinds in (("greedy", GREEDY), ("sampled", SAMPLED))}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jump_forward", ["exact", False])
@pytest.mark.parametrize("kv_tokens", [256, 20_000])
@pytest.mark.parametrize("draft_kv_tokens", [256, 16_384])
@pytest.mark.parametrize("prefill_tokens", [8, 2048])
@pytest.mark.covering(strength=1)
def test_every_draft_of_the_served_model_itself_is_accepted(
    monkeypatch, plain, page_size, overlap, jump_forward, kv_tokens, draft_kv_tokens, prefill_tokens
):
    # Which drafts are verified must not depend on measured times.
    budget = "graftlm.speculation.speculator.DraftBudget"
    monkeypatch.setattr(budget, lambda costs, max_drafts: AllDrafts(max_drafts))
    found, drafted, accepted = run(
        draft_model(kv_tokens=draft_kv_tokens, prefill_tokens=prefill_tokens),
        params_of(GREEDY),
        cache={"page_size": page_size},
        scheduling={"overlap": overlap, "prefill_tokens_per_step": 64},
        grammar={"jump_forward": jump_forward},
        memory={"kv_tokens": kv_tokens},
    )
    assert found == plain["greedy"]
    assert accepted == drafted > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_sampled_output_is_that_of_plain_decoding(plain, overlap):
    found, drafted, accepted = run(draft_model(), params_of(SAMPLED), scheduling={"overlap": overlap})
    assert found == plain["sampled"]
    assert accepted <= drafted


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two checkpoints of one vocabulary with different sizes and weights."""
    folder = tmp_path_factory.mktemp("tiny")
    large = write_tiny_checkpoint(folder / "large", "qwen3", seed=1, num_layers=3, tokenizer=True)
    small = write_tiny_checkpoint(folder / "small", "gemma3_text", seed=2, num_layers=1, hidden_size=32, tokenizer=True)
    return large, small


def test_another_architecture_drafts_for_a_model_of_the_same_vocabulary(tiny):
    large, small = tiny
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    results = []
    for speculation in (None, draft_model(small)):
        with Engine({"model": str(large), "speculation": speculation, "debug": True}) as engine:
            results.append(facts(engine.generate([[5, 6, 7], [8, 9]], params)))
            drafts = engine.stats().drafts
    assert results[0] == results[1]
    assert drafts["draft_model"][1] <= drafts["draft_model"][0]


def other_vocabulary(folder, tiny):
    write_tiny_checkpoint(folder, vocab_size=384)
    return r"\b384 tokens, the served model .* has 320"


def missing(folder, tiny):
    return "draft model cannot be used: No checkpoint at .* speculation.drafter.options.path must be"


def without_config(folder, tiny):
    folder.mkdir()
    return "looked for config.json"


def truncated(folder, tiny):
    write_tiny_checkpoint(folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    return "draft model cannot be used: .*model.safetensors"


def remove_a_tensor(folder):
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def lacks_a_tensor(folder, tiny):
    write_tiny_checkpoint(folder)
    remove_a_tensor(folder)
    return "draft model cannot be used: .*model.norm.weight"


def scores_only(folder, tiny):
    write_tiny_checkpoint(folder, num_labels=2)
    return "has no output projection"


@pytest.mark.parametrize(
    "write",
    [other_vocabulary, missing, without_config, truncated, lacks_a_tensor, scores_only],
    ids=lambda w: w.__name__,
)
def test_an_unfit_checkpoint_is_refused_at_the_start(tmp_path, tiny, write):
    message = write(tmp_path / "draft", tiny)
    with pytest.raises(ConfigError, match=f"speculation.drafter.options.path: .*{message}"):
        Engine(model=str(tiny[0]), speculation=draft_model(tmp_path / "draft"))


@pytest.mark.parametrize("write", [other_vocabulary, missing, without_config], ids=lambda w: w.__name__)
def test_the_checkpoint_is_checked_before_the_weights_of_the_served_model_are_read(tmp_path, tiny, write):
    message = write(tmp_path / "draft", tiny)
    served = shutil.copytree(tiny[0], tmp_path / "served")
    remove_a_tensor(served)
    with pytest.raises(ConfigError, match=f"speculation.drafter.options.path: .*{message}"):
        Engine(model=str(served), speculation=draft_model(tmp_path / "draft"))


def test_a_memory_that_cannot_be_allocated_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"speculation.drafter.options.kv_tokens: 1,[0,]+ tokens of the draft model"):
        Engine(model=str(tiny[0]), speculation=draft_model(tiny[1], kv_tokens=10**15))


def test_auto_leaves_out_a_drafter_that_needs_options(tiny):
    with Engine(model=str(tiny[0]), speculation="auto") as engine:
        assert sorted(engine.stats().drafts) == ["radix", "suffix"]


def test_the_path_is_required(tiny):
    with pytest.raises(ConfigError, match=r"speculation\.drafter\.options\.path: is required"):
        Engine(model=str(tiny[0]), speculation="draft_model")
