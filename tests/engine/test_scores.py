"""Scores, labels and pairs equal those of Transformers' sequence classifiers, with any settings and other load."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from graftlm import Engine
from graftlm.errors import (
    AdapterNotFoundError,
    CheckpointError,
    InvalidPromptError,
    RequestError,
    UnsupportedFeatureError,
)
from graftlm.pooling.pooling import Pooling
from graftlm.pooling.sentence_embedding import EmbeddingDefaults, read_embedding_defaults
from graftlm.testing.tiny_models import write_tiny_checkpoint

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "phi3")
SHARED = list(range(30, 75))
PROMPTS = [[7], [5, 6], [9] * 20, SHARED, [*SHARED, 80, 81], [*SHARED, 90], list(range(10, 130))]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Return a function from a family to its checkpoint with three labels."""
    base = tmp_path_factory.mktemp("classifiers")

    def get(family, num_labels=3):
        path = base / f"{family}-{num_labels}"
        if not path.exists():
            write_tiny_checkpoint(path, family, 3, num_labels=num_labels, tokenizer=True)
        return path

    return get


def start(path, **settings):
    settings = {"memory": {"kv_tokens": 1024}, "debug": True} | settings
    return Engine(model={"path": str(path), "dtype": "float32"}, **settings)


def expected_scores(path, prompts):
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return np.stack([model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(classifier, family):
    path = classifier(family)
    expected = expected_scores(path, PROMPTS)
    with start(path, scheduling={"prefill_tokens_per_step": 24}) as engine:
        for _ in ("computed", "reused"):
            outputs = engine.classify(PROMPTS)
            np.testing.assert_allclose([output.scores for output in outputs], expected, atol=2e-4, rtol=2e-4)
            assert [output.label for output in outputs] == [f"LABEL_{i}" for i in expected.argmax(axis=1)]
        assert outputs[-1].usage.cached_tokens == len(PROMPTS[-1]) - 1
        assert len(engine.embed([[5, 6]])) == 1


def test_scores_are_right_beside_embeddings_in_little_memory_with_large_pages(classifier):
    path = classifier("qwen3")
    expected = expected_scores(path, PROMPTS)
    settings = {
        "cache": {"page_size": 16},
        "memory": {"kv_tokens": 192},
        "scheduling": {"prefill_tokens_per_step": 20, "overlap": False},
    }
    with start(path, **settings) as engine:
        for _ in range(2):
            engine.embed(PROMPTS)
            np.testing.assert_allclose(
                [output.scores for output in engine.classify(PROMPTS)], expected, atol=2e-4, rtol=2e-4
            )


def test_the_layers_of_a_model_with_a_score_head_can_be_quantized(classifier):
    path = classifier("llama")
    with Engine(model={"path": str(path), "dtype": "float32", "quantization": "int8"}) as engine:
        scores = engine.classify([[5, 6, 7]])[0].scores
        assert np.abs(scores - expected_scores(path, [[5, 6, 7]])[0]).max() < 0.5


def test_a_pair_is_joined_as_by_the_tokenizer(classifier):
    path = classifier("llama")
    tokenizer = AutoTokenizer.from_pretrained(path)
    items = ["the sea", "flour"]
    expected = expected_scores(path, [tokenizer("a river", item)["input_ids"] for item in items])
    turned = expected_scores(path, [tokenizer(item, "a river")["input_ids"] for item in items])
    with start(path) as engine:
        np.testing.assert_allclose(engine.score("a river", items), expected, atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(engine.score("a river", items, item_first=True), turned, atol=2e-4, rtol=2e-4)
        shares = engine.score("a river", items, apply_softmax=True)
        np.testing.assert_allclose(np.sum(shares, axis=1), 1.0)


@pytest.fixture(scope="module")
def generator(checkpoint):
    with start(checkpoint("qwen3")) as engine:
        yield engine


def test_a_label_has_the_probability_of_its_next_token(generator, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float32)
    query, items, labels = SHARED, [[80, 81], [90], [5, 6, 7, 8]], [11, 300, 12]
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([query + item])).logits[0, -1] for item in items])
    shares = logits.softmax(dim=-1)[:, labels].numpy()
    found = generator.score(query, items, label_token_ids=labels)
    np.testing.assert_allclose(found, shares, rtol=1e-3)
    among = logits[:, labels].softmax(dim=-1).numpy()
    np.testing.assert_allclose(
        generator.score(query, items, label_token_ids=labels, apply_softmax=True), among, rtol=1e-3, atol=1e-7
    )
    text = generator.score("a river", ["the sea"], label_token_ids=labels)
    np.testing.assert_allclose(
        text, generator.score(generator.tokenizer.encode("a riverthe sea").tolist(), [[]], label_token_ids=labels), 1e-3
    )


def test_a_text_or_a_list_of_ids_is_one_item(generator):
    labels = [11, 300]
    for item in ("the sea", [80, 81], np.array([80, 81])):
        query = "a river" if isinstance(item, str) else [5]
        found = generator.score(query, item, label_token_ids=labels)
        np.testing.assert_allclose(found, generator.score(query, [item], label_token_ids=labels), rtol=1e-4)
        assert np.shape(found) == (1, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda e: e.classify("x"),
            UnsupportedFeatureError,
            "no score head.*To score or rerank with a model that generates",
        ),
        (
            lambda e: e.score("x", "y", label_token_ids=[5], apply_softmax=True),
            RequestError,
            "softmax of one score is always 1",
        ),
        (lambda e: e.classify("x", adapter="none"), UnsupportedFeatureError, "no score head"),
        (lambda e: e.score("x", "y", label_token_ids=[5], adapter="a"), AdapterNotFoundError, "no adapter 'a'"),
        (lambda e: e.score("x", ["y"]), UnsupportedFeatureError, "no score head.*label_token_ids"),
        (lambda e: e.score("x", ["y"], label_token_ids=[]), RequestError, "at least one"),
        (lambda e: e.score("x", ["y"], label_token_ids=[True]), RequestError, "must have token ids only, got True"),
        (lambda e: e.score("x", ["y"], label_token_ids=[10**6]), RequestError, "1000000 is outside the vocabulary"),
        (lambda e: e.score("x", [[5]], label_token_ids=[5]), InvalidPromptError, "all be text, or all be token ids"),
        (lambda e: e.embed("x", pooling="cls"), RequestError, "the first token attends to no other"),
        (lambda e: Pooling("labels"), RequestError, "needs at least one label"),
        (lambda e: Pooling("last", (1,)), RequestError, "needs no labels"),
    ],
)
def test_scores_that_the_model_does_not_support_are_refused(generator, call, error, message):
    with pytest.raises(error, match=message):
        call(generator)


def test_a_classifier_refuses_to_generate(classifier):
    with start(classifier("llama")) as engine:
        with pytest.raises(UnsupportedFeatureError, match="computes embeddings and scores, but cannot generate tokens"):
            engine.generate("x")
        with pytest.raises(UnsupportedFeatureError, match="cannot generate tokens"):
            engine.score("x", ["y"], label_token_ids=[5])


def test_an_embedding_checkpoint_without_an_output_projection_is_served(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint("qwen3"), tmp_path / "base")
    from transformers import AutoModel

    AutoModel.from_pretrained(source, dtype=torch.float32).save_pretrained(tmp_path / "base")
    for file in source.glob("model-*.safetensors"):
        file.unlink()
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    with start(checkpoint("qwen3")) as whole, start(source) as base:
        expected = whole.embed([SHARED], pooling="last")[0].embedding
        np.testing.assert_allclose(base.embed([SHARED], pooling="last")[0].embedding, expected, atol=1e-5)
        with pytest.raises(UnsupportedFeatureError, match="it computes embeddings, but cannot generate tokens"):
            base.generate("x")


def test_dimensions_scales_the_first_numbers_to_unit_length(generator):
    raw = generator.embed([SHARED], normalize=False)[0].embedding
    short = generator.embed([SHARED], dimensions=8)[0].embedding
    np.testing.assert_allclose(short, raw[:8] / np.linalg.norm(raw[:8]), rtol=1e-5)
    assert np.array_equal(generator.embed([SHARED], normalize=False, dimensions=8)[0].embedding, raw[:8])


def write_modules(path, pooling, *others):
    """Write the files that sentence-transformers writes beside a checkpoint."""
    kinds = ["Transformer", "Pooling", *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


MODE = "pooling_mode_{}_tokens".format


@pytest.mark.parametrize(
    ("pooling", "others", "expected"),
    [
        ({"pooling_mode_lasttoken": True, MODE("mean"): False}, ["Normalize"], EmbeddingDefaults("last", True)),
        ({MODE("mean"): True}, [], EmbeddingDefaults("mean", False)),
        ({"pooling_mode": "lasttoken"}, [], EmbeddingDefaults("last", False)),
        (
            {"pooling_mode_cls_token": True},
            ["Normalize"],
            EmbeddingDefaults(
                "mean", True, "its embeddings are pooled by 'cls_token': in a causal model, the first token "
                "attends to no other token"
            ),
        ),
        ({MODE("mean"): True, MODE("max"): True}, [], EmbeddingDefaults(
            "mean", False, "its embeddings are pooled by 'max_tokens, mean_tokens'"
        )),
        ({MODE("mean"): True}, ["Dense"], EmbeddingDefaults(
            "mean", False, "its embeddings use a module 'Dense', which is not supported"
        )),
    ],
)  # fmt: skip
def test_the_defaults_in_sentence_transformers_files_are_read(tmp_path, pooling, others, expected):
    assert read_embedding_defaults(write_modules(tmp_path, pooling, *others)) == expected


def test_the_default_without_such_files_is_the_normalised_mean(tmp_path):
    assert read_embedding_defaults(tmp_path) == EmbeddingDefaults("mean", True, None)


@pytest.mark.parametrize("content", ["{", "{}", '[{"path": ""}]'])
def test_damaged_files_are_reported(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_embedding_defaults(tmp_path)


def test_the_checkpoints_own_pooling_is_the_default(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "own")
    with start(write_modules(path, {"pooling_mode_lasttoken": True})) as engine:
        own, last = engine.embed([SHARED])[0], engine.embed([SHARED], pooling="last", normalize=False)[0]
        np.testing.assert_allclose(own.embedding, last.embedding, atol=1e-5)
    with start(write_modules(path, {"pooling_mode_cls_token": True})) as engine:
        with pytest.raises(UnsupportedFeatureError, match="Set pooling to 'mean' or 'last'"):
            engine.embed([SHARED])
        assert len(engine.embed([SHARED], pooling="mean")) == 1
