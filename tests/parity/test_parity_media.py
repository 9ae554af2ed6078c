"""Models with a tower for pictures, in a whole engine: greedy tokens in float32 equal Hugging Face's."""

import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.tiny_media import MediaOracle, random_picture, write_media_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = ["llava", "qwen2_vl", "idefics3", "smolvlm", "llava_next", "qwen2_5_vl"]

PICTURES = [random_picture(40, 30, 1), random_picture(64, 100, 2), random_picture(17, 90, 3)]
PROMPTS = [
    ("Look: <image> What is it?", PICTURES[:1]),
    ("A record of a river without any picture, for comparison", []),
    ("First <image> and then <image>, last <image>. Which is larger?", PICTURES),
    ("Look: <image> What else?", PICTURES[:1]),
    ("Look: <image> What is it?", PICTURES[1:2]),
    ("<image><image>", [PICTURES[2], PICTURES[2]]),
]

#: page size, tokens per step, cache, overlap, tokens of memory, rows of features
SETTINGS = [
    (1, 5, "radix", True, 4096, 4096),
    (16, 2048, "radix", False, 4096, 4096),
    (16, 7, "radix", True, 544, 80),
    (1, 64, "radix", False, 420, 80),
    (4, 11, "chunk", True, 4096, 80),
]


def prompts_of(kind):
    """Return the prompts of a kind; for Qwen, Transformers' `generate` needs text after each picture."""
    after = "," if kind.startswith("qwen") else ""
    return [(text.replace("<image><image>", f"<image>{after}<image>{after}"), pictures) for text, pictures in PROMPTS]


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    """Return a function from a kind to its checkpoint and Hugging Face's answers."""
    made = {}

    def get(kind):
        if kind not in made:
            path = write_media_checkpoint(tmp_path_factory.mktemp(kind), kind)
            oracle = MediaOracle(path)
            made[kind] = (
                path,
                [oracle.generate(text, pictures, GREEDY.max_tokens) for text, pictures in prompts_of(kind)],
            )
        return made[kind]

    return get


@pytest.mark.few(kind=2)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("page_size", "chunk", "cache", "overlap", "kv_tokens", "num_rows"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(workload, kind, page_size, chunk, cache, overlap, kv_tokens, num_rows):
    path, answers = workload(kind)
    engine = Engine(
        model={"path": str(path), "dtype": "float32", "device": "cpu"},
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap},
        memory={"kv_tokens": kv_tokens},
        media={"feature_bytes": num_rows * 64 * 4},
        debug=True,
    )
    texts, pictures = [text for text, _ in prompts_of(kind)], [pictures or None for _, pictures in PROMPTS]
    with engine:
        for _ in range(2):  # the second time with a full cache
            outputs = engine.generate(texts, GREEDY, image_data=pictures)
            assert [output.completions[0].error for output in outputs] == [None] * len(PROMPTS)
            assert [list(output.token_ids) for output in outputs] == answers
        assert all(token_id >= 0 for output in outputs for token_id in output.prompt_token_ids)
