"""Measures which architectures the `transformers` model provider serves, and writes docs/model-support.md.

    python benchmarks/transformers_architectures.py [--only MODEL_TYPE ...] [--out FILE]

For each architecture, a small checkpoint of random float32 weights is written. An engine serves a batch of requests
with a common prefix twice, with chunked prefill; the second time, it reuses the prefix cache. The greedy tokens must
equal those of Transformers' `generate` with eager attention. The exit status is 1 if tokens differ, if an architecture
that is listed as served is refused, or if one that is listed as refused is served.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track

from graftlm import Engine, SamplingParams
from graftlm.checkpoint import load_model_config
from graftlm.contracts import AttentionLayer, ModelContext
from graftlm.errors import UnsupportedArchitectureError
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_models import write_random_checkpoint
from graftlm_models.transformers_model import TransformersModel

PAGE = Path(__file__).parents[1] / "docs" / "model-support.md"
VOCAB_SIZE, CONTEXT_LEN = 320, 128
SHARED_LEN, PROMPT_LENS = 21, (1, 22, 35, 50)
GREEDY = SamplingParams(temperature=0, max_tokens=8)

#: Entries that the configurations of all checkpoints have.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 16}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GEMMA = {**GROUPED, "head_dim": 16}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture to test, which has one row in the table.

    Attributes:
        model_type: name of the architecture in a configuration of Transformers.
        config: entries in addition to `SIZES`.
        is_served: whether the architecture is listed as served; otherwise it is listed as refused.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    is_served: bool = True


ARCHITECTURES = (
    Architecture("afmoe", GROUPED | EXPERTS | WINDOW | {"head_dim": 16}),
    Architecture("apertus", GROUPED),
    Architecture("arcee", GROUPED),
    Architecture("biogpt"),
    Architecture("bitnet", GROUPED),
    Architecture("cohere", GROUPED),
    Architecture("cohere2", GROUPED | MIXED),
    Architecture("deepseek_v2", LATENT | EXPERTS),
    Architecture("deepseek_v3", LATENT | EXPERTS),
    Architecture("diffllama", GROUPED),
    Architecture("dots1", GROUPED | EXPERTS | MIXED),
    Architecture("ernie4_5", GROUPED | {"head_dim": 16}),
    Architecture("ernie4_5_moe", GROUPED | EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    Architecture("exaone4", GROUPED | MIXED),
    Architecture("exaone_moe", GROUPED | EXPERTS | MIXED | {"head_dim": 16}),
    Architecture("flex_olmo", GROUPED | EXPERTS),
    Architecture("gemma", GEMMA),
    Architecture("glm", GROUPED | {"head_dim": 16}),
    Architecture("glm4", GROUPED | {"head_dim": 16}),
    Architecture("glm4_moe", GROUPED | EXPERTS | {"head_dim": 16}),
    Architecture("gpt2"),
    Architecture("gpt_bigcode"),
    Architecture("gpt_neox"),
    Architecture("gpt_oss", GROUPED | EXPERTS | MIXED | {"head_dim": 16}),
    Architecture("granite", GROUPED | {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    Architecture("granite_swa", GROUPED | MIXED),
    Architecture("granitemoe", GROUPED | EXPERTS),
    Architecture("granitemoeshared", GROUPED | EXPERTS | {"shared_intermediate_size": 32}),
    Architecture("granitemoe_swa", GROUPED | EXPERTS | MIXED),
    Architecture("helium", GROUPED | {"head_dim": 16}),
    Architecture("hrm_text", GROUPED | {"head_dim": 16}),
    Architecture("hunyuan_v1_dense", GROUPED | {"head_dim": 16}),
    Architecture("hunyuan_v1_moe", GROUPED | EXPERTS | {"head_dim": 16}),
    Architecture("hyperclovax", GROUPED),
    Architecture("jais2", GROUPED),
    Architecture("jetmoe", GROUPED | EXPERTS | {"kv_channels": 16, "num_key_value_heads": 2}),
    Architecture("mimo_v2_flash", GROUPED | EXPERTS | MIXED | {"head_dim": 16, "v_head_dim": 12}),
    Architecture("minicpm3", LATENT),
    Architecture("minimax_m2", GROUPED | EXPERTS | {"head_dim": 16}),
    Architecture("ministral3", GROUPED | WINDOW | {"head_dim": 16}),
    Architecture("mixtral", GROUPED | EXPERTS | WINDOW),
    Architecture("nanochat", GROUPED),
    Architecture("nemotron", GROUPED),
    Architecture("olmo", GROUPED | {"clip_qkv": 0.5}),
    Architecture("olmo2", GROUPED),
    Architecture("olmo3", GROUPED | MIXED),
    Architecture("olmoe", GROUPED | EXPERTS),
    Architecture("opt", {"word_embed_proj_dim": 32, "ffn_dim": 96, "pad_token_id": 1}),
    Architecture("persimmon"),
    Architecture("phi", GROUPED),
    Architecture("phi3", GROUPED | WINDOW),
    Architecture("phimoe", GROUPED | EXPERTS | WINDOW),
    Architecture("qwen2_moe", GROUPED | EXPERTS),
    Architecture("qwen3_moe", GROUPED | EXPERTS | {"head_dim": 16}),
    Architecture("seed_oss", GROUPED | {"head_dim": 16}),
    Architecture("smollm3", GROUPED | {"no_rope_layers": [1, 0]}),
    Architecture("solar_open", GROUPED | EXPERTS | {"head_dim": 16}),
    Architecture("stablelm", GROUPED | {"qk_layernorm": True}),
    Architecture("starcoder2", GROUPED | WINDOW),
    Architecture("vaultgemma", GEMMA | MIXED | {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 6.0}),
    Architecture("youtu", LATENT),
    Architecture("bloom", is_served=False),
    Architecture("codegen", {"rotary_dim": 8}, is_served=False),
    Architecture("doge", GROUPED, is_served=False),
    Architecture("falcon", is_served=False),
    Architecture("falcon_mamba", is_served=False),
    Architecture("gptj", is_served=False),
    Architecture("jamba", GROUPED | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1}, is_served=False),
    Architecture("lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}, is_served=False),
    Architecture("llama4_text", GROUPED | EXPERTS | {"head_dim": 16, "attention_chunk_size": 16}, is_served=False),
    Architecture("mamba", is_served=False),
    Architecture("minimax", GROUPED | EXPERTS | {"head_dim": 16}, is_served=False),
    Architecture("mpt", is_served=False),
    Architecture("olmo_hybrid", GROUPED, is_served=False),
    Architecture("qwen3_next", GROUPED | EXPERTS | {"head_dim": 16, "num_hidden_layers": 4}, is_served=False),
    Architecture("rwkv", is_served=False),
    Architecture("xglm", is_served=False),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding for one architecture.

    Attributes:
        name: name of the model's class.
        layers: description of the attention layers.
        refusal: reason for the refusal; None if the architecture is served.
        is_equal: whether all tokens equal those of Transformers.
    """

    architecture: Architecture
    name: str
    layers: str
    refusal: str | None
    is_equal: bool

    @property
    def is_defect(self) -> bool:
        """Whether the architecture is served or refused contrary to its `is_served`, or its tokens differ."""
        return (self.refusal is None) != self.architecture.is_served or (self.refusal is None and not self.is_equal)

    def row(self) -> str:
        """Return the row of the table."""
        result = "equal tokens" if self.is_equal else "**tokens differ**"
        cells = [f"`{self.architecture.model_type}`", f"`{self.name}`"]
        cells += [self.layers, result] if self.refusal is None else [self.refusal]
        return f"| {' | '.join(cells)} |"


def examine(architecture: Architecture, folder: Path) -> Finding:
    """Write a checkpoint into a folder, serve it, and compare its tokens with those of Transformers."""
    name = write_random_checkpoint(folder, architecture.model_type, SIZES | architecture.config, tokenizer=True)
    try:
        config = load_model_config(folder)
        layers = TransformersModel(ModelContext(config, torch.device("cpu"), torch.float32)).attention_layers
    except UnsupportedArchitectureError as error:
        return Finding(architecture, name, "", str(error), False)
    prompts, oracle = make_prompts(), HuggingFaceModel(folder)
    expected = [oracle.generate(prompt, GREEDY.max_tokens) for prompt in prompts]
    return Finding(architecture, name, describe(layers), None, serve(folder, prompts) == [expected] * 2)


def make_prompts() -> list[list[int]]:
    """Return prompts of various lengths; the longer ones have a common prefix."""
    rng = np.random.default_rng(3)
    shared = rng.integers(2, VOCAB_SIZE, SHARED_LEN).tolist()
    drawn = [rng.integers(2, VOCAB_SIZE, length).tolist() for length in PROMPT_LENS]
    return [shared + prompt[SHARED_LEN:] if len(prompt) > SHARED_LEN else prompt for prompt in drawn]


def serve(folder: Path, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Answer the prompts twice with the `transformers` provider; return the generated tokens of both times."""
    engine = Engine(
        model={"path": str(folder), "architecture": "transformers", "dtype": "float32", "device": "cpu"},
        attention="torch_native",
        cache={"name": "radix", "page_size": 4},
        scheduling={"prefill_tokens_per_step": 16},
        memory={"kv_tokens": 1024},
        debug=True,
    )
    with engine:
        return [[list(output.token_ids) for output in engine.generate(prompts, GREEDY)] for _ in range(2)]


def describe(layers: Sequence[AttentionLayer]) -> str:
    """Return a description of a model's kinds of attention, each listed once."""
    kinds = Counter(
        ", ".join(
            (
                f"{layer.num_heads}/{layer.num_kv_heads} heads of {layer.head_dim}",
                *([] if layer.sliding_window is None else [f"window {layer.sliding_window}"]),
                *([] if layer.soft_cap is None else [f"soft cap {layer.soft_cap:g}"]),
                *([] if layer.sinks is None else ["sinks"]),
            )
        )
        for layer in layers
    )
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items())


def page(findings: Sequence[Finding]) -> str:
    """Return the text of docs/model-support.md."""
    served = [finding for finding in findings if finding.refusal is None]
    refused = [finding for finding in findings if finding.refusal is not None]
    lines = [
        "<!-- Generated by `python benchmarks/transformers_architectures.py`: do not edit. -->",
        "",
        "# Architectures that run as Transformers' own modules",
        "",
        f"`python benchmarks/transformers_architectures.py` tested these architectures with Transformers "
        f"{transformers.__version__}: {len(served)}",
        f"are served, {len(refused)} are refused. Each has a small checkpoint of random float32 weights. "
        "Several requests with a common",
        "prefix run together, twice, with chunked prefill; the second run uses the prefix cache. *equal tokens* means",
        "that all greedy tokens equal those of `generate` in Transformers.",
        "[models.md](models.md#any-other-architecture) explains how these models run. If graftlm has its own",
        "implementation of an architecture, that implementation is used by default.",
        "",
        "## Served",
        "",
        "`2 x 4/2 heads of 16` means two attention calls per forward pass, each with 4 query heads and 2 key/value",
        "heads of size 16.",
        "",
        "| `model_type` | Architecture | Attention calls of the test checkpoint | Result |",
        "|---|---|---|---|",
        *(finding.row() for finding in served),
        "",
        "## Refused",
        "",
        "These architectures are refused with this message when the engine starts.",
        "",
        "| `model_type` | Architecture | Why |",
        "|---|---|---|",
        *(finding.row() for finding in refused),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the architectures; write the page if all of them were examined."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", help="some architectures; writes no page")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chosen = [one for one in ARCHITECTURES if options.only is None or one.model_type in options.only]
    console = Console()
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for architecture in track(chosen, "Architectures", console=console):
            findings.append(examine(architecture, Path(folder) / architecture.model_type))
            console.print(findings[-1].row(), markup=False, soft_wrap=True)
    if options.only is None:
        options.out.write_text(page(findings), encoding="utf-8")
    defects = [finding.architecture.model_type for finding in findings if finding.is_defect]
    if defects:
        console.print(f"Not as listed: {', '.join(defects)}")
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
