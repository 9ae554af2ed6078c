"""Fixtures that several folders use: checkpoints, and a real server of the bundled model."""

import logging
import os
import sys

import pytest

# Fixtures import what they need themselves, so tests of the host-side parts import no torch and start in a second.
pytest_plugins = ["quick_set", "server_order"]

#: Whether torch is limited to one thread.
ONE_THREAD = pytest.StashKey[bool]()

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
    "mamba2": {"family": "mamba2", "seed": 22, "num_layers": 3},
    "granite_hybrid": {"family": "granitemoehybrid", "seed": 23, "num_layers": 3},
    "qwen3_next": {"family": "qwen3_next", "seed": 24, "num_layers": 3},
    "qwen3_5": {"family": "qwen3_5_text", "seed": 25, "num_layers": 3},
    "lfm2": {
        "family": "lfm2",
        "seed": 21,
        "num_layers": 4,
        "config": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    },
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


def pytest_configure(config):
    """Let HTTP clients load no certificates: that takes 20 ms for each client, and no test uses HTTPS."""
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)


def pytest_runtest_setup(item):
    """Limit torch to one thread once it is imported: models are tiny, so a second thread costs more than it saves."""
    torch = sys.modules.get("torch")
    if torch is not None and not item.config.stash.get(ONE_THREAD, False):
        torch.set_num_threads(1)
        item.config.stash[ONE_THREAD] = True


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Restore the process's logging after a test that configures it, as `serve` does."""
    root, names = logging.getLogger(), ("uvicorn", "uvicorn.error", "asyncio")
    before = [(logger, list(logger.handlers), logger.level) for logger in (root, *map(logging.getLogger, names))]
    yield
    for logger, handlers, level in before:
        if logger.handlers != handlers or logger.level != level:
            logger.handlers[:] = handlers
            logger.setLevel(level)


@pytest.fixture(scope="session")
def kernel_cache():
    """Return the folder of compiled kernels, also for engines: the first test that needs a kernel compiles it."""
    from graftlm.layers.kernel_build import user_cache_dir

    return user_cache_dir(os.environ)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function from a name of CHECKPOINTS, or "demo", to a checkpoint's folder."""
    from graftlm.demo import demo_checkpoint
    from graftlm.testing.tiny_models import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")

    def get(name):
        if name == "demo":
            return demo_checkpoint()
        path = folder / name
        if not path.exists():
            write_tiny_checkpoint(path, max_position_embeddings=1024, tokenizer=True, shards=2, **CHECKPOINTS[name])
        return path

    return get


class TinyAdapters:
    """Adapters of one tiny checkpoint, as `peft` saved them, and the models that they were merged into.

    Attributes:
        base: the checkpoint's folder.
        folders: name -> the adapter's folder.
    """

    def __init__(self, base, folder, configs):
        from graftlm.testing.hugging_face import HuggingFaceModel
        from graftlm.testing.tiny_adapters import write_tiny_adapter

        self.base = base
        self.folders = {name: folder / name for name in configs}
        self._models = {None: HuggingFaceModel(base)} | {
            name: HuggingFaceModel(write_tiny_adapter(self.folders[name], base, seed, **config))
            for seed, (name, config) in enumerate(configs.items())
        }
        self._known = {}

    def expected(self, name, prompt, max_tokens):
        """Return the merged model's output for a prompt; `name` None is the base model."""
        key = (name, tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self._models[name].generate(prompt, max_tokens)
        return self._known[key]


#: Arguments of `peft`; each makes an adapter of another kind.
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.k_proj": 5},
        "alpha_pattern": {"up_proj": 6},
    },
    "second-layer": {"r": 1, "lora_alpha": 2, "target_modules": ["gate_proj", "down_proj"], "layers_to_transform": [1]},
}


@pytest.fixture(scope="session")
def adapters(checkpoint, tmp_path_factory):
    """Adapters of the tiny Llama, one for each of ADAPTERS."""
    return TinyAdapters(checkpoint("llama"), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Run `graftlm serve` on a free port. Tests must not change its state.

    `server.url` is its address, `server.profile_dir` its folder of profiles.
    """
    from graftlm.testing.server_process import ServerProcess

    files = {"path": str(tmp_path_factory.mktemp("files"))}
    profile_dir = tmp_path_factory.mktemp("profiles")
    settings = {"open_admin": True, "files": files, "profile_dir": str(profile_dir)}
    config = {"model": "demo", "memory": {"kv_tokens": 32768}, "server": settings}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        it.profile_dir = profile_dir
        yield it
