"""Models whose layers are split over ranks compute what the whole model computes."""

from functools import partial

import pytest
import torch

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import ModelContext, ParallelContext
from graftlm.errors import ConfigError
from graftlm.registry import Registry
from graftlm.testing.paged_model import PagedModel
from graftlm.testing.rank_threads import run_ranks
from graftlm.testing.tiny_models import write_tiny_checkpoint

TOKENS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(4)).tolist()
QUICK = ["llama", "phi3", "gpt_oss", "deepseek_v2"]
OTHERS = [
    "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text",
    "deepseek_v3",
]  # fmt: skip
FAMILIES = [*QUICK, *(pytest.param(family, marks=pytest.mark.full) for family in OTHERS)]


def make_model(path, communicator=None, *, device="cpu"):
    config = load_model_config(path)
    parallel = ParallelContext()
    if communicator is not None:
        parallel = ParallelContext(communicator.rank, communicator.size, communicator)
    context = ModelContext(config, torch.device(device), torch.float32, parallel=parallel)
    model = Registry.load().model_for(config.architectures, "auto").create({}, context)
    model.load_weights(iter_weights(path))
    return model


def logits_of(path, communicator=None):
    """Return hidden states and logits, the number of weights of the rank, and a weight that was read back."""
    torch.set_num_threads(1)
    model = make_model(path, communicator)
    num_weights = sum(weight.numel() for weight in model.parameters())
    with torch.inference_mode():
        hidden = PagedModel(model).run_in_chunks(TOKENS, 16)
        logits = model.logits(hidden)
        name = "model.layers.1.self_attn.o_proj.weight"
        return hidden, logits, num_weights, model.read_weight(name)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_equals_the_whole_model(tmp_path, family, tied, size):
    path = write_tiny_checkpoint(tmp_path, family, vocab_size=322, tie_word_embeddings=tied)
    whole = logits_of(path)
    for hidden, logits, num_weights, weight in run_ranks(size, partial(logits_of, path)):
        torch.testing.assert_close(hidden, whole[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, whole[1], rtol=1e-4, atol=1e-4)
        assert logits.argmax(1).equal(whole[1].argmax(1))
        assert num_weights < (1 / size + 0.35) * whole[2]
        assert weight.equal(whole[3])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "num_attention_heads 4 and num_key_value_heads 2 equally. The nearest numbers of ranks for this model: 2"),
        (8, "num_attention_heads 4 equally. The nearest number of ranks for this model: 4"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused(tmp_path, size, message):
    path = write_tiny_checkpoint(tmp_path, "llama")
    context = ModelContext(
        load_model_config(path), torch.device("meta"), torch.float32, parallel=ParallelContext(0, size)
    )
    provider = Registry.load().model_for(("LlamaForCausalLM",), "auto")
    with pytest.raises(ConfigError) as caught:
        provider.create({}, context)
    assert message in str(caught.value)
