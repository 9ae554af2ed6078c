import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import Model, ModelConfig, ModelContext
from graftlm.errors import ModelError, UnsupportedArchitectureError, WeightError
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.model import ModelConformance
from graftlm.testing.paged_model import PagedModel
from graftlm.testing.tiny_models import write_random_checkpoint
from graftlm_models.transformers_model import TransformersModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 112,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def context(model_type: str, architecture: str, **config: Any) -> ModelContext:
    """Return the context for a model of an architecture, without a checkpoint."""
    try:
        raw = AutoConfig.for_model(model_type, **(SIZES | config)).to_dict()
    except ValueError:  # Transformers has no such type
        raw = {"model_type": model_type, **SIZES, **config}
    sizes = {"vocab_size": 112, "max_position_embeddings": 64}
    return ModelContext(ModelConfig((architecture,), **sizes, raw=raw), torch.device("cpu"), torch.float32)


class OfTransformers(ModelConformance):
    model_type: ClassVar[str]
    config: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        write_random_checkpoint(tmp_path, self.model_type, SIZES | self.config)

    def create(self, context: ModelContext) -> Model:
        return TransformersModel(context)

    def checkpoint(self) -> Path:
        return self.folder


class TestGpt2(OfTransformers):
    model_type = "gpt2"  # tied embeddings, learned positions


@pytest.mark.parametrize("kind", ["missing", "of another shape"])
def test_errors_have_the_tensor_names_of_the_file(tmp_path: Path, kind: str) -> None:
    write_random_checkpoint(tmp_path, "gpt_neox", SIZES)
    tensors = dict(iter_weights(tmp_path))
    assert "embed_out.weight" in tensors  # the module's lm_head.weight
    head = tensors.pop("embed_out.weight")
    if kind == "of another shape":
        tensors["embed_out.weight"] = head[1:]
    with pytest.raises(WeightError, match=r"'embed_out\.weight'"):
        load(tmp_path, tensors)


def test_a_model_on_the_meta_device_cannot_list_its_layers() -> None:
    twin = TransformersModel(replace(context("gpt_neox", "GPTNeoXForCausalLM"), device=torch.device("meta")))
    with pytest.raises(ModelError, match="known only after a trial run"):
        _ = twin.attention_layers


class TestOlmo3(OfTransformers):
    model_type = "olmo3"
    config: ClassVar[dict[str, Any]] = {"num_key_value_heads": 2, **MIXED}


def test_layers_are_derived_from_attention_calls() -> None:
    config = {"head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 8.0, "num_key_value_heads": 2}
    window, full = TransformersModel(context("gemma2", "Gemma2ForCausalLM", **config, **MIXED)).attention_layers
    assert (window.layer_id, window.num_heads, window.num_kv_heads, window.head_dim) == (0, 4, 2, 16)
    assert (window.scale, window.soft_cap, window.sliding_window) == (0.5, 8.0, 4)
    assert (full.layer_id, full.sliding_window) == (1, None)


def test_sinks_are_parameters_of_the_model() -> None:
    model = TransformersModel(context("gpt_oss", "GptOssForCausalLM", **EXPERTS, **MIXED, head_dim=8))
    parameters = {id(parameter) for parameter in model.parameters()}
    assert [id(layer.sinks) in parameters for layer in model.attention_layers] == [True, True]


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    config = {"sliding_window": 64, "num_key_value_heads": 2}
    layers = TransformersModel(context("mistral", "MistralForCausalLM", **config)).attention_layers
    assert [layer.sliding_window for layer in layers] == [None, None]


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
REFUSED = {
    "an encoder and a decoder": ("bart", "BartForCausalLM", {}, "has an encoder and a decoder"),
    "no language model": ("t5", "T5ForConditionalGeneration", {}, "no language model of model_type 't5'"),
    "unknown": (
        "lama",
        "LamaForCausalLM",
        {},
        "No model serves LamaForCausalLM.*no language model of model_type 'lama'",
    ),
    "another head": (
        "llama",
        "LlamaForSequenceClassification",
        {},
        "LlamaForCausalLM of.*correct architectures",
    ),
    "an encoder": ("bert", "BertModel", {}, "model_type 'bert' is an encoder.*Encoders are not supported"),
    "code not trusted": (
        "own",
        "OwnModel",
        {"auto_map": {"AutoModelForCausalLM": "a.B"}},
        "set model.trust_remote_code",
    ),
    "rope by the longest context": (
        "olmo",
        "OlmoForCausalLM",
        {"rope_parameters": LONG},
        "context_len to at most 32",
    ),
    "a recurrent state": ("mamba", "MambaForCausalLM", {}, "no argument for the positions.*recurrent state"),
    "distance biases": ("bloom", "BloomForCausalLM", {}, "distance bias in attention"),
    "convolutions": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"]},
        "other ways than attention",
    ),
    "linear attention": (
        "minimax",
        "MiniMaxForCausalLM",
        {**EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
        "other ways than attention",
    ),
    "attention of its own": ("falcon", "FalconForCausalLM", {}, "its own attention functions"),
    "attention out of reach": ("xglm", "XGLMForCausalLM", {}, "XGLM"),
    "masks of its own": ("doge", "DogeForCausalLM", {}, "trial run of DogeModel.*computes with masks"),
    "attention in chunks": (
        "llama4_text",
        "Llama4ForCausalLM",
        {**EXPERTS, "head_dim": 8, "attention_chunk_size": 16},
        "neither causal nor a sliding window",
    ),
    "attention both ways": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"head_dim": 8, "use_bidirectional_attention": True},
        "neither causal nor a sliding window",
    ),
}


@pytest.mark.parametrize(("model_type", "architecture", "config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_module_that_cannot_be_paged_is_refused_with_the_reason(
    model_type: str, architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=message):
        TransformersModel(context(model_type, architecture, **config))


def test_a_shorter_context_allows_more_models() -> None:
    long = context("olmo", "OlmoForCausalLM", rope_parameters=LONG)
    assert len(TransformersModel(replace(long, context_len=32)).attention_layers) == 2
    chunks = context("llama4_text", "Llama4ForCausalLM", **EXPERTS, head_dim=8, attention_chunk_size=16)
    assert len(TransformersModel(replace(chunks, context_len=16)).attention_layers) == 2


def test_an_entry_that_transformers_refuses_is_refused() -> None:
    good = context("olmo", "OlmoForCausalLM")
    raw = {**good.config.raw, "rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(UnsupportedArchitectureError, match=r"cannot create OlmoForCausalLM.*rope_parameters"):
        TransformersModel(replace(good, config=replace(good.config, raw=raw)))


# -- Weights


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one tensor per projection of each expert; the module has two tensors for all experts."""
    path = tmp_path_factory.mktemp("experts")
    write_random_checkpoint(path, "qwen2_moe", {**SIZES, **EXPERTS, "moe_intermediate_size": 8})
    return path


def load(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> TransformersModel:
    model = TransformersModel(ModelContext(load_model_config(path), torch.device("cpu"), dtype))
    model.load_weights(tensors.items())
    return model


def test_experts_are_stacked_in_order_for_any_order_of_files(experts: Path) -> None:
    tensors = dict(iter_weights(experts))
    assert any(".experts.3." in name for name in tensors)
    names = sorted(tensors)
    random.Random(2).shuffle(names)
    expected = load(experts, tensors).causal.state_dict()
    shuffled = load(experts, {name: tensors[name] for name in names}).causal.state_dict()
    assert all(torch.equal(shuffled[name], tensor) for name, tensor in expected.items())
    gate_up = expected["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up[3, :8], tensors["model.layers.1.mlp.experts.3.gate_proj.weight"])


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", r"model\.layers\.0\.mlp\.experts"),
        ("model.layers.1.mlp.experts.2.down_proj.weight", r"model\.layers\.1\.mlp\.experts\.down_proj"),
        ("model.norm.weight", r"lacks 'model\.norm\.weight'"),
    ],
)
def test_a_missing_tensor_is_named_even_if_tensors_are_joined(experts: Path, removed: str, message: str) -> None:
    tensors = dict(iter_weights(experts))
    del tensors[removed]
    with pytest.raises(WeightError, match=message):
        load(experts, tensors)


def test_weights_can_be_loaded_again_in_place(experts: Path) -> None:
    tensors = dict(iter_weights(experts))
    model = load(experts, tensors)
    places = {name: tensor.data_ptr() for name, tensor in model.causal.state_dict().items()}
    before = model.causal.get_parameter("model.layers.0.mlp.experts.gate_up_proj").clone()
    model.load_weights((name, 2 * tensor) for name, tensor in tensors.items())
    assert torch.equal(model.causal.get_parameter("model.layers.0.mlp.experts.gate_up_proj"), 2 * before)
    assert places == {name: tensor.data_ptr() for name, tensor in model.causal.state_dict().items()}


def test_tensors_that_the_module_computes_or_drops_are_ignored(experts: Path) -> None:
    tensors = dict(iter_weights(experts)) | {"model.rotary_emb.inv_freq": torch.ones(4)}
    load(experts, tensors)


def test_half_precision_keeps_the_same_tensors_wide_as_transformers(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1}
    write_random_checkpoint(tmp_path, "glm4_moe", {**SIZES, **EXPERTS, **sizes, "topk_group": 1})
    state = load(tmp_path, dict(iter_weights(tmp_path)), torch.bfloat16).causal.state_dict()
    wide = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {"model.layers.1.mlp.gate.e_score_correction_bias"}


# -- Code in a checkpoint

CODE = """
from transformers import {base}Config, {base}ForCausalLM

class OwnConfig({base}Config):
    model_type = "own"

class OwnForCausalLM({base}ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def bring_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewrite_config: Callable[..., None]
) -> Callable[[Path, str], ModelContext]:
    """Give a checkpoint its own code, based on an architecture, and trust it."""
    modules = str(tmp_path / "modules")  # otherwise Transformers copies the code into the user's cache
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)

    def bring(path: Path, base: str) -> ModelContext:
        (path / "own.py").write_text(CODE.format(base=base))
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        rewrite_config(path, model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map)
        return ModelContext(load_model_config(path), torch.device("cpu"), torch.float32, code_folder=path)

    return bring


def test_code_of_a_trusted_checkpoint_runs(tmp_path: Path, bring_code: Callable[[Path, str], ModelContext]) -> None:
    path = tmp_path / "own"
    write_random_checkpoint(path, "olmo", SIZES)
    prompt = list(range(20))
    expected = HuggingFaceModel(path).logits(prompt)
    model = TransformersModel(bring_code(path, "Olmo"))
    model.load_weights(iter_weights(path))
    assert type(model.causal).__name__ == "OwnForCausalLM"
    torch.testing.assert_close(model.logits(PagedModel(model).run_in_chunks(prompt, 3)), expected)


def test_code_with_its_own_attention_functions_is_refused(
    tmp_path: Path, bring_code: Callable[[Path, str], ModelContext]
) -> None:
    path = tmp_path / "own"
    write_random_checkpoint(path, "falcon", SIZES)
    with pytest.raises(UnsupportedArchitectureError, match="OwnForCausalLM chooses between its own"):
        TransformersModel(bring_code(path, "Falcon"))
