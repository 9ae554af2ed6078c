"""Weights are replaced in place (all or some, from disk or memory, packed, quantized or plain), or not at all."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm import Engine, SamplingParams
from graftlm.errors import CheckpointError, EngineError, RequestError, UnsupportedFeatureError, WeightError
from graftlm.testing.gguf_files import write_gguf
from graftlm.testing.tiny_models import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41], list(range(20, 60))]
NORM = "model.layers.0.input_layernorm.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return two checkpoints of each family with different weights."""
    base, known = tmp_path_factory.mktemp("weights"), {}

    def get(family, **fields):
        key = (family, *fields)
        if key not in known:
            known[key] = [
                write_tiny_checkpoint(base / f"{len(known)}-{seed}", family, seed, tokenizer=True, **fields)
                for seed in (1, 2)
            ]
        return known[key]

    return get


def start(folder, **settings):
    return Engine(
        model={"path": str(folder), "dtype": "float32", **settings.pop("model", {})},
        memory={"kv_tokens": 1024},
        debug=True,
        **settings,
    )


def tokens(engine):
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def fresh(folder, **settings):
    with start(folder, **settings) as engine:
        return tokens(engine)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("mixtral", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("lfm2", {}),
        ("mamba2", {}),
        ("granitemoehybrid", {}),
        ("qwen3_next", {}),
        (
            "mistral",
            {"hidden_size": 640, "head_dim": 160, "intermediate_size": 640, "num_layers": 1},
        ),  # large enough to be packed
    ],
)
def test_new_weights_give_the_tokens_of_a_new_engine(folders, family, fields):
    old, new = folders(family, **fields)
    expected = {path: fresh(path) for path in (old, new)}
    assert expected[old] != expected[new]
    with start(old) as engine:
        assert tokens(engine) == expected[old]
        engine.update_weights(new)
        assert tokens(engine) == expected[new]
        halves = list(tensors_of(old).items())
        engine.update_weights(halves[::2])
        engine.update_weights(iter(halves[1::2]))
        assert tokens(engine) == expected[old]
        for name, tensor in tensors_of(old).items():
            torch.testing.assert_close(engine.get_weight(name), tensor, rtol=0, atol=1e-6)
        assert tokens(engine) == expected[old]


def test_quantized_layers_are_quantized_again(folders):
    old, new = folders("llama")
    settings = {"model": {"quantization": "int8"}}
    expected = fresh(new, **settings)
    with start(old, **settings) as engine:
        engine.update_weights(new)
        assert tokens(engine) == expected
        engine.update_weights(old)
        engine.update_weights(tensors_of(new).items())
        assert tokens(engine) == expected
        with pytest.raises(
            UnsupportedFeatureError, match=r"quantized by 'int8', so all weights must be replaced together: .*lacks"
        ):
            engine.update_weights([(NORM, tensors_of(old)[NORM])])
        with pytest.raises(UnsupportedFeatureError, match="quantized by 'int8'"):
            engine.get_weight(NORM)
        assert tokens(engine) == expected


def test_graphs_use_the_new_weights(folders):
    old, new = folders("llama")
    for model in ({"quantization": "int8"}, {}):
        settings = {"model": model, "execution": {"graphs": True}}
        expected = fresh(new, **settings)
        with start(old, **settings) as engine:
            engine.update_weights(new)
            assert tokens(engine) == expected


def damaged(folder, target, change):
    shutil.copytree(folder, target)
    tensors = tensors_of(target)
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(KEY), WeightError, f"lacks '{KEY}'"),
        (lambda t: t.update({KEY: t[KEY][:-1].clone()}), WeightError, r"shape \[31, 64\]"),
        (lambda t: t.update({KEY: t[KEY].int()}), WeightError, "int32"),
        (lambda t: t.update(surplus=torch.ones(3)), WeightError, "'surplus'"),
    ],
)
def test_a_checkpoint_that_does_not_match_changes_nothing(folders, tmp_path, change, error, message):
    old, new = folders("llama")
    bad = damaged(new, tmp_path / "bad", change)
    with start(old) as engine:
        before = tokens(engine)
        with pytest.raises(error, match=message):
            engine.update_weights(bad)
        engine.flush_cache()
        assert tokens(engine) == before
        assert torch.equal(engine.get_weight(NORM), tensors_of(old)[NORM])


def test_tied_weights_that_differ_change_nothing(folders, tmp_path):
    old, new = folders("qwen2", tie_word_embeddings=True)
    bad = damaged(new, tmp_path / "bad", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with start(old) as engine:
        with pytest.raises(WeightError, match=r"ties '(model\.embed_tokens|lm_head)\.weight'"):
            engine.update_weights(bad)
        assert torch.equal(engine.get_weight("lm_head.weight"), tensors_of(old)["model.embed_tokens.weight"])


def test_a_truncated_file_changes_nothing(folders, tmp_path):
    old, new = folders("llama")
    bad = shutil.copytree(new, tmp_path / "bad")
    data = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(data[:-100])
    with start(old) as engine:
        before = tokens(engine)
        with pytest.raises(CheckpointError, match="truncated"):
            engine.update_weights(bad)
        assert tokens(engine) == before


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([], RequestError, "no weights are given"),
        ([(NORM, torch.ones(64)), (NORM, torch.ones(64))], RequestError, "twice"),
        ([(NORM, torch.ones(64)), ("nonsense", torch.ones(64))], WeightError, "'nonsense'"),
        ([(NORM, torch.ones(64)), (KEY, torch.ones(64))], WeightError, r"shape \[64\]"),
        ("/nowhere", CheckpointError, "No checkpoint"),
    ],
)
def test_wrong_weights_are_refused_completely(folders, weights, error, message):
    old, _ = folders("llama")
    with start(old) as engine:
        with pytest.raises(error, match=message):
            engine.update_weights(weights)
        assert torch.equal(engine.get_weight(NORM), tensors_of(old)[NORM])
        with pytest.raises(RequestError, match=rf"no weight '{NORM}s'; the nearest is '{NORM}'"):
            engine.get_weight(f"{NORM}s")


def test_a_checkpoint_of_another_model_is_refused_with_the_differing_entry(folders, tmp_path):
    old, new = folders("llama")
    other = shutil.copytree(new, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5, "transformers_version": "x"}))
    with start(old) as engine, pytest.raises(CheckpointError, match=r"rms_norm_eps is 0\.5, expected 1e-06"):
        engine.update_weights(other)


def test_a_gguf_file_and_a_folder_of_the_same_model_replace_each_other(folders, tmp_path):
    old, new = folders("llama")
    file = write_gguf(new, tmp_path / "new.gguf", tokenizer=True)
    config = json.loads((new / "config.json").read_text())
    expected = fresh(new)
    with start(old) as engine:
        engine.update_weights(file)
        assert tokens(engine) == expected
    with start(file) as engine:
        engine.update_weights(old)
        engine.update_weights(new)
        assert tokens(engine) == expected
        other = shutil.copytree(new, tmp_path / "other")
        (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
        with pytest.raises(CheckpointError, match=r"other/config\.json is not of the served.*rms_norm_eps is 0\.5"):
            engine.update_weights(other)
    message = r"new\.gguf is not of the served model.*num_hidden_layers is 2, expected 1"
    with start(folders("llama", num_layers=1)[0]) as engine, pytest.raises(CheckpointError, match=message):
        engine.update_weights(file)


def test_tensors_may_be_a_mapping_and_weights_have_a_version(folders):
    old, new = folders("llama")
    expected = fresh(new)
    with start(old) as engine:
        assert engine.weight_version == "default"
        engine.update_weights(tensors_of(new), weight_version="step-1")
        assert (engine.weight_version, tokens(engine)) == ("step-1", expected)
        with pytest.raises(RequestError, match="no weights are given"):
            engine.update_weights({}, weight_version="step-2")
        assert engine.weight_version == "step-1"


def test_a_file_that_fails_during_the_copy_leaves_the_old_weights(folders, tmp_path):
    old, new = folders("llama")
    bad = shutil.copytree(new, tmp_path / "bad")
    with start(old) as engine:
        before = tokens(engine)
        checked = engine._parts.weights.checked(bad)
        (bad / "model.safetensors").unlink()
        with pytest.raises(EngineError, match=r"failed halfway, and the weights of .* were loaded again"):
            engine._thread.call_exclusive(lambda: engine._parts.replace_weights(checked, flush_cache=True)).result()
        assert tokens(engine) == before


def test_cached_prefixes_are_removed_unless_flush_cache_is_false(folders):
    old, new = folders("llama")
    prompt = PROMPTS[2]
    with start(old) as engine:
        expected_new = fresh(new)[2]
        engine.generate(prompt, GREEDY)
        engine.update_weights(new)
        (output,) = engine.generate(prompt, GREEDY)
        assert (output.usage.cached_tokens, output.token_ids) == (0, expected_new)
        engine.update_weights(old, flush_cache=False)
        assert engine.generate(prompt, GREEDY)[0].usage.cached_tokens == len(prompt) - 1


def test_lower_tiers_never_mix_blocks_of_two_weights(folders, tmp_path):
    old, new = folders("llama")
    cache = {
        "name": "hicache",
        "page_size": 4,
        "options": {"host_tokens": 4096, "storage": {"name": "file", "options": {"path": str(tmp_path / "kv")}}},
    }
    prompt = list(range(20, 160))  # storage keeps blocks of 64 tokens
    expected = {}
    for path in (old, new):
        with start(path) as engine:
            expected[path] = engine.generate(prompt, GREEDY)[0].token_ids

    def first_tokens(engine):
        (output,) = engine.generate(prompt, GREEDY)
        return output.token_ids, output.usage.cached_tokens

    with start(old, cache=cache) as engine:
        assert first_tokens(engine) == (expected[old], 0)
        engine.update_weights(new)
        assert first_tokens(engine) == (expected[new], 0)
        with pytest.raises(RequestError, match="flush_cache must be true"):
            engine.update_weights(old, flush_cache=False)
    with start(new, cache=cache) as engine:
        token_ids, cached = first_tokens(engine)
        assert token_ids == expected[new]
        assert cached > 0  # stored with the fingerprint of the new weights
        engine.update_weights(tensors_of(old).items())
        assert first_tokens(engine) == (expected[old], 0)  # tensors of unknown origin share no blocks


def test_running_requests_end_with_the_weights_they_started_with(folders):
    old, new = folders("llama")
    expected_old, expected_new = fresh(old), fresh(new)
    with start(old) as engine:

        async def run():
            running = [asyncio.create_task(engine.agenerate(PROMPTS, GREEDY)) for _ in range(3)]
            while not engine.stats().running_requests:
                await asyncio.sleep(0)
            update = asyncio.create_task(asyncio.to_thread(engine.update_weights, new))
            before = [[output.token_ids for output in outputs] for outputs in await asyncio.gather(*running)]
            await update
            return before

        assert asyncio.run(run()) == [expected_old] * 3
        assert tokens(engine) == expected_new


def test_running_requests_can_be_aborted(folders):
    old, new = folders("llama")
    with start(old) as engine:
        stream = engine.stream([5, 6], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        next(stream)
        engine.update_weights(new, abort_requests=True)
        assert list(stream)[-1].finish_reason.value == "abort"
        assert tokens(engine) == fresh(new)


def test_closing_the_engine_ends_a_waiting_update(folders):
    old, _ = folders("llama")
    with start(old) as engine:
        pass
    with pytest.raises(EngineError, match="closed"):
        engine.update_weights([(NORM, torch.ones(64))])
