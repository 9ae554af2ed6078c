"""Changes that assembly makes to a model."""

import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest

from graftlm import Provider, hookimpl
from graftlm.assembly.assemble import assemble
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionCapabilities
from graftlm.demo import demo_checkpoint
from graftlm.errors import ConfigError
from graftlm.layers import Linear
from graftlm.layers.ops import NativeOps, TorchOps, UsesOps
from graftlm.layers.packing import can_pack
from graftlm.registry import Registry
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.tokenization import Tokenizer


@pytest.mark.parametrize("prepack", [True, False])
def test_large_matrices_are_packed_if_configuration_and_cpu_allow_it(prepack, tmp_path):
    write_tiny_checkpoint(tmp_path, hidden_size=512, intermediate_size=512, tokenizer=True)
    settings = [f"model.path={tmp_path}", "model.device=cpu", "memory.kv_tokens=64", f"model.prepack={prepack}"]
    config = EngineConfig.load(None, settings)
    platform = detect_platform(config)
    parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
    parts.loop.close()
    weights = [module.weight for module in parts.device_parts.model.modules() if isinstance(module, Linear)]
    # A packed layer no longer has its plain weight.
    assert any(weight.numel() == 0 for weight in weights) == (prepack and can_pack(weights[0].dtype))


WITH_ANOTHERS_TOKENIZER = """
import sys
from pathlib import Path
from graftlm.assembly.assemble import assemble
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.registry import Registry
from graftlm.tokenization import Tokenizer

config = EngineConfig.load(None, ["model.path=demo", "model.device=cpu", "memory.kv_tokens=64"])
platform = detect_platform(config)
text = Path(sys.argv[1]).read_text()
parts = assemble(config, Registry.load(config.plugins, (), platform), platform,
                 await_tokenizer=lambda: Tokenizer.from_json(text))
parts.loop.close()
print(parts.tokenizer.encode("2 + 3").tolist(), "transformers" in sys.modules)
"""


def test_with_a_given_tokenizer_the_checkpoints_tokenizer_and_transformers_are_not_loaded(tmp_path):
    tokenizer = Tokenizer.load(demo_checkpoint())
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    command = [sys.executable, "-c", WITH_ANOTHERS_TOKENIZER, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == f"{tokenizer.encode('2 + 3').tolist()} False"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("native_ops", "kind"), [(True, NativeOps), (False, TorchOps)])
def test_layers_get_the_configured_operations(native_ops, kind, tmp_path):
    write_tiny_checkpoint(tmp_path, tokenizer=True)
    settings = [f"model.path={tmp_path}", "model.device=cpu", "memory.kv_tokens=64", f"model.native_ops={native_ops}"]
    config = EngineConfig.load(None, settings)
    platform = detect_platform(config)
    parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
    parts.loop.close()
    used = [module.ops for module in parts.device_parts.model.modules() if isinstance(module, UsesOps)]
    assert {type(ops) for ops in used} == {kind}
    # A layer has two norms and four matrices. In addition: the last norm, the rotation, the embedding and the output
    # projection.
    assert len(used) == 2 * (2 + 4) + 2 + 2


@pytest.mark.parametrize(
    ("family", "claims", "reason"),
    [
        (
            "deepseek_v2",
            {"sinks": True},
            "it cannot use a part of the keys as values",
        ),
        ("gpt_oss", {"value_prefix": True}, "it does not support attention sinks, which the model needs"),
        (
            "gpt_oss",
            {"sinks": True, "sliding_window": False},
            "it does not support sliding windows, which the model needs",
        ),
        ("llama", {"head_dims": (64,)}, "it supports head dims 64, but the model has 16"),
    ],
)
def test_a_backend_without_a_capability_that_the_model_needs_is_refused(family, claims, reason, tmp_path):
    class Plugin:
        @hookimpl
        def provide_attention_backends(self):
            capabilities = AttentionCapabilities(**claims)
            return [Provider(name="toy", summary="A toy", api_version=1, create=Mock(), capabilities=capabilities)]

    write_tiny_checkpoint(tmp_path, family, tokenizer=True)
    config = EngineConfig.load(None, [f"model.path={tmp_path}", "model.device=cpu", "attention.name=toy"])
    platform = detect_platform(config)
    with pytest.raises(ConfigError, match=f"attention backend 'toy' does not fit this engine: {reason}"):
        assemble(config, Registry.load(config.plugins, (Plugin(),), platform), platform)
