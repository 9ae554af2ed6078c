from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import AttentionLayer, Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.paged_model import PagedModel, Tokens
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint
from graftlm_models.deepseek import DeepseekForCausalLM

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"num_layers": 3}),
    "v2 latent queries": ("deepseek_v2", {"config": {"q_lora_rank": 40, "attention_bias": True}}),
    "v2 grouped experts": ("deepseek_v2", {"config": {"topk_method": "group_limited_greedy", **GROUPS}}),
    "v2 yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2 dense, tied, biases": (
        "deepseek_v2",
        {"tie_word_embeddings": True, "config": {"first_k_dense_replace": 2, "mlp_bias": True}},
    ),
    "v2 only experts": ("deepseek_v2", {"config": {"first_k_dense_replace": 0}}),
    "v2 odd sizes, two files": (
        "deepseek_v2",
        {"num_heads": 2, "shards": 2, "config": {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "v_head_dim": 10}},
    ),
    "v3": ("deepseek_v3", {"num_layers": 3}),
    "v3 halves": ("deepseek_v3", {"config": {"rope_interleave": False, "q_lora_rank": None}}),
    "v3 one group, plain weights": (
        "deepseek_v3",
        {"config": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}, "rope_parameters": YARN},
    ),
}


@pytest.mark.parametrize(("family", "sizes"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(
    family: Family, sizes: dict[str, Any], tmp_path: Path, assert_parity
) -> None:
    assert_parity(DeepseekForCausalLM, write_tiny_checkpoint(tmp_path, family, **sizes))


def test_the_config_file_of_v2_lite_is_read(tmp_path: Path, assert_parity, rewrite_config) -> None:
    """The file has DeepSeek's own form: an older rope entry, and the entries of its own code."""
    write_tiny_checkpoint(tmp_path, "deepseek_v2", rope_parameters=YARN)
    rope = {("type" if name == "rope_type" else name): YARN[name] for name in YARN if name != "rope_theta"}
    absent = ("rope_parameters", "head_dim", "qk_head_dim", "mlp_bias")
    own = {"moe_layer_freq": 1, "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "aux_loss_alpha": 0.001}
    rewrite_config(tmp_path, remove=absent, rope_scaling=rope, rope_theta=1000.0, **own)
    assert_parity(DeepseekForCausalLM, tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_token_caches_its_latent_vector_and_one_rotated_key(family: Family, tmp_path: Path, new_context) -> None:
    model = DeepseekForCausalLM(new_context(write_tiny_checkpoint(tmp_path, family)))
    for layer in model.attention_layers:
        assert isinstance(layer, AttentionLayer)
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim) == (4, 1, 48, 32)
        assert layer.numbers_per_token == 48  # 4 heads of 32 + 24 numbers would be 224


def test_layers_for_speculative_drafts_are_left_out(tmp_path: Path, new_context) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v3")  # its config.json names one such layer
    weights = dict(iter_weights(tmp_path))
    draft = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.2.enorm.weight": torch.zeros(64)}
    model, other = DeepseekForCausalLM(new_context(tmp_path)), DeepseekForCausalLM(new_context(tmp_path))
    model.load_weights(weights.items())
    other.load_weights((draft | weights).items())
    prompt = [Tokens(0, [5, 6, 7])]
    (expected,), (got,) = PagedModel(model).step(prompt), PagedModel(other).step(prompt)
    assert torch.equal(got, expected)
    with pytest.raises(ModelError, match=r"contains 'model\.layers\.3\.enorm\.weight'"):
        other.load_weights({**weights, "model.layers.3.enorm.weight": torch.zeros(64)}.items())


def test_a_large_number_of_draft_layers_costs_no_time(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v3", num_layers=1)
    rewrite_config(tmp_path, num_nextn_predict_layers=10**12)
    model, weights = DeepseekForCausalLM(new_context(tmp_path)), dict(iter_weights(tmp_path))
    model.load_weights(({"model.layers.999999999.enorm.weight": torch.zeros(64)} | weights).items())
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(model.read_weight(name), weights[name])


@pytest.mark.parametrize(
    ("family", "entries", "error", "message"),
    [
        ("deepseek_v2", {"kv_lora_rank": None}, CheckpointError, "kv_lora_rank as a whole number above 0"),
        ("deepseek_v2", {"first_k_dense_replace": -1}, CheckpointError, "first_k_dense_replace .* 0 or more, got -1"),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 9},
            CheckpointError,
            "num_experts_per_tok 9, but only n_routed_experts 4",
        ),
        ("deepseek_v2", {"moe_layer_freq": 2}, UnsupportedArchitectureError, "moe_layer_freq 2, but only 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedArchitectureError, "norm_topk_prob true"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedArchitectureError, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, UnsupportedArchitectureError, "only 'softmax'"),
        ("deepseek_v2", {"attention_bias": True}, UnsupportedArchitectureError, "attention_bias true with a null"),
        ("deepseek_v3", {"n_group": 3}, CheckpointError, "n_group 3 and topk_group 2; n_group must divide"),
        ("deepseek_v3", {"n_group": 8}, CheckpointError, "a group needs 2 experts"),
        ("deepseek_v3", {"topk_method": "greedy"}, UnsupportedArchitectureError, "only 'noaux_tc'"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "hqq"}}, UnsupportedArchitectureError, "hqq"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused(
    family: Family,
    entries: dict[str, Any],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
    new_context,
    rewrite_config,
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        DeepseekForCausalLM(new_context(tmp_path))


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v2", initializer_range=0.1)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = DeepseekForCausalLM(ModelContext(load_model_config(tmp_path), torch.device("cpu"), dtype))
        model.load_weights(iter_weights(tmp_path))
        (hidden,) = PagedModel(model).step([Tokens(0, list(range(1, 30)))])
        assert hidden.dtype == dtype
        outputs.append(hidden.float())
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert error < 0.1


class TestDeepseekConformance(ModelConformance):
    parameters: ClassVar = {"page_size": (4,), "chunk_len": (3,)}

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path_factory):
        self.folder = tmp_path_factory.getbasetemp() / "deepseek-conformance"
        if not self.folder.exists():
            config = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1}  # few, so that each one matters
            write_tiny_checkpoint(self.folder, "deepseek_v3", config=config)

    def create(self, context: ModelContext) -> Model:
        return DeepseekForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
