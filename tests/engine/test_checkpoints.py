"""An engine with a quantized or GGUF checkpoint answers like one with the plain checkpoint of the same weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm import Engine, SamplingParams
from graftlm.checkpoint import iter_weights
from graftlm.errors import CheckpointError
from graftlm.testing.gguf_files import write_gguf
from graftlm.testing.tiny_models import write_tiny_checkpoint

PROMPTS = ["A small river runs past the mill", "Numbers such as 0, 1, 2", "Where does"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
GROUP = 32


def answers(path, **model):
    with Engine({"model": {"path": str(path), "device": "cpu", **model}, "memory": {"kv_tokens": 512}}) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def quantize_as_gptq(folder, plain_folder):
    """Quantize the linear layers of a checkpoint in place, and also write the plain checkpoint of the same weights."""
    shutil.copytree(folder, plain_folder)
    tensors, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = plain[name] = weight
            continue
        module, groups = name.removesuffix(".weight"), weight.unflatten(1, (-1, GROUP))
        scales = (groups.amax(-1) - groups.amin(-1)).div(15).half()  # [N, G]
        zeros = (-groups.amin(-1) / scales).round().clamp(1, 15)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
        plain[name] = ((codes - zeros[..., None]) * scales[..., None].float()).flatten(1)
        tensors[f"{module}.qweight"] = words(codes.flatten(1)).t().contiguous()
        tensors[f"{module}.qzeros"] = words((zeros - 1).t().contiguous())
        tensors[f"{module}.scales"] = scales.t().contiguous()
    save_file(tensors, folder / "model.safetensors")
    save_file(plain, plain_folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def words(numbers):
    """Pack eight 4-bit numbers of a row into a word, the first in the lowest bits."""
    shifted = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, axis=-1).view(np.int32))


@pytest.fixture(scope="module")
def gptq(tmp_path_factory):
    """Return a quantized checkpoint, and the plain one of the same weights."""
    from graftlm.testing.tiny_models import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("gptq")
    write_tiny_checkpoint(folder / "gptq", hidden_size=64, intermediate_size=96, head_dim=16, tokenizer=True)
    quantize_as_gptq(folder / "gptq", folder / "plain")
    return folder / "gptq", folder / "plain"


def test_the_weights_of_a_quantized_checkpoint_equal_the_plain_ones(gptq):
    quantized, plain = (dict(iter_weights(folder)) for folder in gptq)
    assert quantized.keys() == plain.keys()
    assert all(torch.equal(quantized[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_quantized_checkpoint_is_served_and_may_be_quantized_again(gptq, quantization):
    quantized, plain = (answers(folder, quantization=quantization) for folder in gptq)
    assert quantized == plain


def test_a_gguf_file_is_served_with_its_tokenizer(checkpoint, tmp_path):
    file = write_gguf(checkpoint("demo"), tmp_path / "demo.gguf", tokenizer=True)
    with Engine({"model": {"path": str(file), "device": "cpu"}, "memory": {"kv_tokens": 512}}) as engine:
        (output,) = engine.generate([[{"role": "user", "content": "What is the capital of France?"}]], GREEDY)
    with Engine({"model": {"device": "cpu"}, "memory": {"kv_tokens": 512}}) as engine:
        (expected,) = engine.generate([[{"role": "user", "content": "What is the capital of France?"}]], GREEDY)
    assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
    assert output.usage == expected.usage


def test_impossible_sizes_are_refused_before_a_model_is_built(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "m", tokenizer=True, num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers 1000000000, but the weights are"):
        Engine(model={"path": str(folder), "dtype": "float32", "device": "cpu"}, memory={"kv_tokens": 64})
