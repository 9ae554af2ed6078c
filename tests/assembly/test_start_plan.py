"""The memory estimate of `serve --dry-run`, which refuses nothing."""

import re

import pytest

from graftlm.assembly.device_memory import DeviceMemory, gib
from graftlm.assembly.start_plan import plan_start
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.errors import ConfigError
from graftlm.registry import Registry
from graftlm.testing.sparse_checkpoint import LlamaShape, write_sparse_checkpoint
from graftlm.testing.tiny_heads import write_tiny_eagle3
from graftlm.testing.tiny_models import write_tiny_checkpoint

GIB = 1 << 30
#: 1.16 GiB in bfloat16.
SHAPE = LlamaShape(
    hidden_size=1024, intermediate_size=65536, num_layers=3, num_heads=8, num_kv_heads=8, head_dim=128, vocab_size=4096
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint whose folder also has weights that are not loaded, as in Mistral's checkpoints."""
    folder = write_sparse_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE)
    for name in ("consolidated.safetensors", "model-00001-of-00002.safetensors"):
        with (folder / name).open("wb") as file:
            file.truncate(100 * GIB)  # a sparse file
    return folder


def plan(checkpoint, have, **fields):
    model = {"path": str(checkpoint), "device": "cpu"} | fields.pop("model", {})
    config = EngineConfig(model=model, **fields)
    platform = detect_platform(config)
    return plan_start(config, Registry.load(config.plugins, (), platform), platform, have)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bfloat16", SHAPE.weight_bytes), ("float32", 2 * SHAPE.weight_bytes)]
)
def test_the_plan_counts_only_loaded_weights_in_the_models_dtype(checkpoint, dtype, num_bytes):
    lines = plan(checkpoint, DeviceMemory(64 * GIB, 32 * GIB, None), model={"dtype": dtype})
    assert f", {gib(num_bytes)} of weights, {dtype} on cpu, 1 replica(s)" in lines[0]
    assert f"the weights leave about {gib(32 * GIB - num_bytes)} free" in lines[2]


@pytest.mark.parametrize("free_bytes", [0, GIB, SHAPE.weight_bytes])
def test_an_estimate_of_too_little_memory_is_a_warning(checkpoint, free_bytes):
    lines = plan(checkpoint, DeviceMemory(64 * GIB, free_bytes, None))
    assert lines[2].startswith(
        "warning: KV memory: the estimated free memory is too small: the weights need about 1.16 GiB of "
    )
    assert f"the free {gib(free_bytes)} (64.00 GiB in total). If this is still true after they are loaded" in lines[2]
    assert any(line.startswith("plugin: attention = ") for line in lines)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"kv_tokens": 10**12}, "memory.kv_tokens: 1,000,000,000,000 tokens need"),
        ({"window_tokens": 64}, "has no separate memory for wi"),
    ],
)
def test_memory_above_the_total_is_refused_even_if_no_memory_is_free(checkpoint, memory, message):
    with pytest.raises(ConfigError, match=message):
        plan(checkpoint, DeviceMemory(64 * GIB, 0, None), memory=memory, cache={"name": "radix"})


def draft_model(path, **options):
    return {"drafter": {"name": "draft_model", "options": {"path": str(path), **options}}}


def test_the_plan_counts_a_draft_model_and_its_keys_and_values(checkpoint):
    kv_bytes = 1600 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 2 * 2
    lines = plan(
        checkpoint,
        DeviceMemory(64 * GIB, 32 * GIB, None),
        model={"dtype": "bfloat16"},
        cache={"page_size": 16},
        speculation=draft_model(checkpoint, kv_tokens=1615),
    )
    assert f"draft model: {checkpoint} (LlamaForCausalLM), {gib(SHAPE.weight_bytes)} of weights" in lines[2]
    assert f"{gib(kv_bytes)} of KV memory: 1,600 tokens of {kv_bytes // 1600:,} bytes" in lines[2]
    left = gib(32 * GIB - 2 * SHAPE.weight_bytes - kv_bytes)
    assert f"the weights and the draft model leave about {left} free" in lines[3]


def test_a_draft_model_that_cannot_generate_is_refused(tmp_path):
    served = write_tiny_checkpoint(tmp_path / "served", tokenizer=True)
    draft = write_tiny_checkpoint(tmp_path / "draft", tokenizer=True, num_labels=2)
    with pytest.raises(ConfigError, match=r"options.path: the draft model cannot be used: .* no output projection"):
        plan(served, None, speculation=draft_model(draft))


def test_a_memory_of_the_draft_model_above_the_total_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"speculation.drafter.options.kv_tokens: 1,0[0,]+ tokens of the draft"):
        plan(checkpoint, DeviceMemory(64 * GIB, 0, None), speculation=draft_model(checkpoint, kv_tokens=10**12))


def test_the_plan_counts_a_draft_head_and_its_layer(tmp_path):
    served = write_tiny_checkpoint(tmp_path / "served", tokenizer=True)
    head = write_tiny_eagle3(tmp_path / "head", hidden_layers=(0, 1, 2))
    device_memory = DeviceMemory(64 * GIB, 32 * GIB, None)
    plain = plan(served, device_memory)
    lines = plan(served, device_memory, speculation={"drafter": {"name": "eagle3", "options": {"path": str(head)}}})
    assert lines[2].startswith("draft head: Eagle3Head, ")
    token_bytes = [
        int(re.search(r"tokens of ([0-9,]+) bytes", line)[1].replace(",", "")) for line in (plain[2], lines[3])
    ]
    assert token_bytes[1] == token_bytes[0] * 3 // 2  # two layers, and a head of the same shape
    write_tiny_eagle3(head, served_size=32)
    with pytest.raises(ConfigError, match=r"options.path: the draft head cannot be used: .* hidden_size 32, but"):
        plan(served, device_memory, speculation={"drafter": {"name": "eagle3", "options": {"path": str(head)}}})
