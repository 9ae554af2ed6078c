"""What several folders' tests share: checkpoints, and a real server of the bundled model."""

import pytest
import torch

from graftlm.demo import demo_checkpoint
from graftlm.testing.server_process import ServerProcess
from graftlm.testing.tiny_models import write_tiny_checkpoint

# The models are tiny: a second thread costs more than it helps, most of all while other tests keep the cores busy.
torch.set_num_threads(1)

#: name -> shape; "demo" is the bundled model.
CHECKPOINTS = {
    "llama": {"family": "llama", "seed": 1},
    "llama-mha-untied-rope3": {
        "family": "llama",
        "seed": 2,
        "hidden_size": 48,
        "num_layers": 3,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 32,
        "vocab_size": 499,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"family": "mistral", "seed": 5, "hidden_size": 48, "head_dim": 16},
    "gemma2": {"family": "gemma2", "seed": 6, "num_layers": 3, "head_dim": 32, "tie_word_embeddings": True},
    "gemma3": {
        "family": "gemma3_text",
        "seed": 7,
        "hidden_size": 48,
        "num_layers": 6,
        "head_dim": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "qwen2": {
        "family": "qwen2",
        "seed": 3,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {"family": "deepseek_v2", "seed": 8, "num_layers": 3},
    "gpt_oss": {"family": "gpt_oss", "seed": 9, "num_layers": 3},
    "qwen3": {"family": "qwen3", "seed": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "num_layers": 3},
    "mixtral": {"family": "mixtral", "seed": 8, "config": {"sliding_window": 24}},
    "qwen2-moe": {"family": "qwen2_moe", "seed": 9, "num_layers": 3, "config": {"mlp_only_layers": [1]}},
    "qwen3-moe": {"family": "qwen3_moe", "seed": 10, "head_dim": 24, "tie_word_embeddings": True},
    "phi3": {
        "family": "phi3",
        "seed": 11,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        "config": {"sliding_window": 24},
    },
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function from a name of CHECKPOINTS, or "demo", to a checkpoint's folder."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(name):
        if name == "demo":
            return demo_checkpoint()
        path = folder / name
        if not path.exists():
            write_tiny_checkpoint(path, max_position_embeddings=1024, tokenizer=True, shards=2, **CHECKPOINTS[name])
        return path

    return get


@pytest.fixture(scope="session")
def server():
    """Run `graftlm serve` on a free port; `server.url` is its address. Tests leave it as they find it."""
    with ServerProcess({"model": "demo", "memory": {"kv_tokens": 32768}}, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it
