"""The oracle's greedy tokens equal those of `generate` in transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftlm.testing.hugging_face import HuggingFaceModel

MODELS = ["demo", "llama-mha-untied-rope3", "gemma2", "gemma3", "qwen2", "deepseek_v2", "gpt_oss", "mixtral", "phi3"]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 40])
def test_tokens_equal_those_of_generate(checkpoint, name, length):
    path = checkpoint(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.randint(1, 300, (1, length), generator=torch.Generator().manual_seed(length))
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    assert HuggingFaceModel(model).generate(prompt[0].tolist(), 24) == expected[0, length:].tolist()
