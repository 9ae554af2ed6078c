"""Models with a recurrent state in a whole engine: greedy tokens in float32 equal Hugging Face's, and prefixes hit."""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_adapters import write_tiny_adapter

PROMPT_LENS = [1, 2, 17, 33, 64, 100, 140, 180]
SHARED_LEN = 50  # number of tokens in the common prefix of all longer prompts; not a page end for 16 and 64 tokens
GREEDY = SamplingParams(temperature=0, max_tokens=12)
MODELS = ["lfm2", "mamba2", "granite_hybrid", "qwen3_next", "qwen3_5"]

#: page size, tokens per step, overlap, tokens of memory, snapshots, interval of snapshots
SETTINGS = [
    (16, 64, True, 4096, None, 1024),
    (1, 7, False, 4096, None, None),
    (64, 2048, True, 4096, None, 64),
    (16, 2048, False, 4096, 3, 16),  # states are evicted, and their pages stay
    (4, 64, True, 224, None, 8),  # pages are evicted with their states, and requests are retracted
    (1, 2048, True, 300, 5, None),
]


class Workload:
    """Prompts of a model, and the answers of Hugging Face to them."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self._oracle = HuggingFaceModel(checkpoint)
        self._known = {}
        rng = np.random.default_rng(11)
        shared = rng.integers(1, 300, SHARED_LEN).tolist()
        drawn = [rng.integers(1, 300, length).tolist() for length in PROMPT_LENS]
        self.prompts = [shared + prompt[SHARED_LEN:] if len(prompt) > SHARED_LEN else prompt for prompt in drawn]

    def answer(self, prompt, num_tokens=GREEDY.max_tokens):
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._oracle.generate(prompt, num_tokens)
        return self._known[key]

    def engine(self, page_size=16, chunk=64, overlap=True, kv_tokens=4096, num_snapshots=None, interval=1024, **fields):
        return Engine(
            model={"path": str(self.checkpoint), "dtype": "float32", "device": "cpu"},
            cache={"page_size": page_size, "options": {"state_interval_tokens": interval}},
            scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap},
            memory={"kv_tokens": kv_tokens, "state_snapshots": num_snapshots},
            debug=True,
            **fields,
        )

    def check(self, engine, prompts):
        """Check the answers to some prompts; return the numbers of reused tokens."""
        outputs = engine.generate(prompts, GREEDY)
        assert [list(output.token_ids) for output in outputs] == [self.answer(prompt) for prompt in prompts]
        return [output.usage.cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def workload(checkpoint):
    """Return a function from a model's name to its workload."""
    loads = {}

    def get(name):
        if name not in loads:
            loads[name] = Workload(checkpoint(name))
        return loads[name]

    return get


@pytest.mark.parametrize("settings", [SETTINGS[0], *(pytest.param(it, marks=pytest.mark.full) for it in SETTINGS[1:])])
@pytest.mark.parametrize("model", [*MODELS[:1], *(pytest.param(it, marks=pytest.mark.full) for it in MODELS[1:])])
def test_greedy_tokens_equal_transformers(workload, model, settings):
    load = workload(model)
    with load.engine(*settings) as engine:
        load.check(engine, load.prompts)
        load.check(engine, load.prompts[::-1])


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_identical_prompts_hit_to_their_last_page_end_also_after_splits(workload, model, page_size):
    load = workload(model)
    prompt = load.prompts[-1]
    last = (len(prompt) - 1) // page_size * page_size
    with load.engine(page_size) as engine:
        assert load.check(engine, [prompt]) == [0]
        assert load.check(engine, [prompt]) == [last]
        for cut in (133, 100, 40):
            load.check(engine, [[*prompt[:cut], 7, 8, 9]])
            assert load.check(engine, [prompt]) == [last]


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_forks_of_a_prompt_equal_transformers(workload, model):
    load = workload(model)
    with load.engine() as engine:
        (output,) = engine.generate([load.prompts[-1]], SamplingParams(temperature=0, max_tokens=12, n=8))
        assert [list(choice.token_ids) for choice in output.completions] == 8 * [load.answer(load.prompts[-1])]


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_a_chat_hits_to_the_last_page_end_of_its_last_answer(workload, model):
    load = workload(model)
    chat, expected = load.prompts[5], 0
    with load.engine() as engine:
        for turn in range(3):
            assert load.check(engine, [chat]) == [expected]
            expected = (len(chat) + GREEDY.max_tokens - 1) // 16 * 16
            chat = chat + load.answer(chat) + [20 + turn, 30, 40]


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_requests_with_an_adapter_have_their_own_states(workload, model, tmp_path):
    load = workload(model)
    merged = write_tiny_adapter(tmp_path, load.checkpoint, r=4, lora_alpha=8, target_modules=r".*in_proj\w*")
    oracle, prompts = HuggingFaceModel(merged), load.prompts[4:]
    with load.engine(lora={"adapters": {"a": str(tmp_path)}, "max_rank": 8}) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, GREEDY, adapter="a")
            assert [list(output.token_ids) for output in outputs] == [oracle.generate(p, 12) for p in prompts]
            load.check(engine, prompts)
