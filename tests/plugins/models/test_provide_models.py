import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

import graftlm_models
from graftlm.contracts import API_VERSION, NoOptions, Platform
from graftlm.registry import Registry
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint


@pytest.mark.parametrize(
    ("family", "name", "architecture"),
    [
        ("llama", "llama", "LlamaForCausalLM"),
        ("mistral", "mistral", "MistralForCausalLM"),
        ("ministral", "mistral", "MinistralForCausalLM"),
        ("mixtral", "mistral", "MixtralForCausalLM"),
        ("gemma2", "gemma", "Gemma2ForCausalLM"),
        ("gemma3_text", "gemma", "Gemma3ForCausalLM"),
        ("qwen2", "qwen", "Qwen2ForCausalLM"),
        ("qwen2_moe", "qwen", "Qwen2MoeForCausalLM"),
        ("qwen3", "qwen", "Qwen3ForCausalLM"),
        ("qwen3_moe", "qwen", "Qwen3MoeForCausalLM"),
        ("phi3", "phi", "Phi3ForCausalLM"),
        ("deepseek_v2", "deepseek", "DeepseekV2ForCausalLM"),
        ("deepseek_v3", "deepseek", "DeepseekV3ForCausalLM"),
        ("gpt_oss", "gpt_oss", "GptOssForCausalLM"),
        ("lfm2", "lfm2", "Lfm2ForCausalLM"),
        ("mamba2", "mamba2", "Mamba2ForCausalLM"),
        ("granitemoehybrid", "granite_hybrid", "GraniteMoeHybridForCausalLM"),
        ("qwen3_next", "qwen_next", "Qwen3NextForCausalLM"),
        ("qwen3_5_text", "qwen_next", "Qwen3_5ForCausalLM"),
    ],
)
def test_each_architecture_has_one_provider_that_creates_its_model(
    family: Family, name: str, architecture: str, tmp_path: Path, new_context
) -> None:
    write_tiny_checkpoint(tmp_path, family, num_layers=3)
    claims = [p for p in graftlm_models.provide_models() if architecture in p.capabilities.architectures]
    assert [p.name for p in claims] == [name]
    model = claims[0].create(NoOptions(), new_context(tmp_path))
    assert len(model.attention_layers) + len(model.state_layers) == 3
    assert [layer.layer_id for layer in model.attention_layers] == list(range(len(model.attention_layers)))


def test_providers_have_the_current_api_version_and_run_anywhere() -> None:
    for provider in graftlm_models.provide_models():
        assert provider.api_version == API_VERSION
        assert provider.unavailable(Platform()) is None


def test_listing_the_models_does_not_import_torch() -> None:
    program = "import sys, graftlm_models; graftlm_models.provide_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("architecture", "name"), [("LlamaForCausalLM", "llama"), ("OlmoForCausalLM", "transformers")])
def test_other_architectures_use_transformers_modules(architecture: str, name: str) -> None:
    assert Registry.load().model_for([architecture]).name == name


def test_every_architecture_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    rows = {name.strip(): classes for name, classes in cells if re.search(r"`[A-Z]\w+`", classes)}
    for provider in graftlm_models.provide_models():
        if provider.capabilities.any_architecture:
            continue  # docs/model-support.md has the measured ones
        row = rows.pop(f"`{provider.name}`")
        assert re.findall(r"`(\w+)`", row) == list(provider.capabilities.architectures)
    assert not rows


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("config", [{}, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}])
def test_layers_declare_the_same_windows_as_transformers_caches(
    family: Family, config: dict[str, Any], tmp_path: Path, new_context
) -> None:
    has_windows = family != "llama" and not family.startswith("deepseek")
    write_tiny_checkpoint(tmp_path, family, num_layers=7, config=config if has_windows else {})
    cache = DynamicCache(config=AutoConfig.from_pretrained(tmp_path))
    context = new_context(tmp_path)
    (provider,) = (
        p for p in graftlm_models.provide_models() if context.config.architectures[0] in p.capabilities.architectures
    )
    model = provider.create(NoOptions(), context)
    attending = [layer for layer in cache.layers if not isinstance(layer, LinearAttentionCacheLayerMixin)]
    windows = [getattr(layer, "sliding_window", None) for layer in attending]
    assert [layer.sliding_window for layer in model.attention_layers] == windows
    assert len(model.state_layers) == len(cache.layers) - len(attending)
