"""The log line about the size of KV memory, and the device memory on which it depends."""

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from graftlm.assembly.kv_memory import DeviceMemory, explain, size_memory
from graftlm.assembly.step_memory import StepMemory
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionLayer
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, size_kv
from graftlm.layers import KV_DTYPES
from graftlm.memory import WindowSpan
from graftlm.registry import Registry

GIB = 1 << 30
FULL = AttentionLayer(layer_id=0, num_heads=8, num_kv_heads=8, head_dim=64, scale=1.0)  # 2,048 bytes per token
WINDOWED = replace(FULL, layer_id=1, sliding_window=64)
DEMAND = KVDemand(
    kv_tokens=None, window_tokens=None, kv_fraction=0.5, free_bytes=16 * GIB, page_size=16, num_rows=64,
    context_len=1 << 20, prefill_tokens=2048,
)  # fmt: skip
DEVICE = DeviceMemory(80 * GIB, 16 * GIB, 60 * GIB)
HOST = DeviceMemory(32 * GIB, 16 * GIB, None)
STEPS = StepMemory(activation_bytes=3 * GIB, graph_bytes=GIB)
SPLIT = {"name": "swa_radix", "page_size": 16}


@pytest.mark.parametrize(
    ("layers", "changes", "have", "steps", "held", "line"),
    [
        (
            [FULL], {}, HOST, StepMemory(), torch.float16,
            "4,194,304 tokens of 2,048 bytes, limited to memory.kv_fraction 0.5 of the free memory "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {"kv_fraction": 0.95}, DEVICE, STEPS, torch.float16,
            "6,291,456 tokens of 2,048 bytes, limited by the memory for activations and graphs (80.00 GiB of memory: "
            "60.00 GiB weights, 16.00 GiB free, 3.00 GiB of it for activations, 1.00 GiB for graphs)",
        ),
        (
            [FULL], {"context_len": 4096}, DEVICE, STEPS, torch.float16,
            "262,144 tokens of 2,048 bytes, enough for 64 requests of 4,096 tokens (80.00 GiB of memory: "
            "60.00 GiB weights, 16.00 GiB free, 3.00 GiB of it for activations, 1.00 GiB for graphs)",
        ),
        (
            [FULL], {"kv_tokens": 1600}, DEVICE, StepMemory(), torch.float16,
            "1,600 tokens of 2,048 bytes, set by memory.kv_tokens "
            "(80.00 GiB of memory: 60.00 GiB weights, 16.00 GiB free)",
        ),
        (
            [FULL, WINDOWED], {"kv_tokens": 16000, "window_tokens": 1600, "span": WindowSpan(64, 16)},
            HOST, StepMemory(), torch.float16,
            "16,000 tokens of 4,096 bytes, 1,600 tokens for sliding-window layers, set by memory.kv_tokens "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {"kv_tokens": 1600}, HOST, StepMemory(), torch.int8,
            "1,600 tokens of 1,056 bytes in int8, 1.94 times as many as in float16, set by memory.kv_tokens "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {}, HOST, StepMemory(), torch.float8_e4m3fn,
            "8,388,608 tokens of 1,024 bytes in float8_e4m3fn, 2.00 times as many as in float16, limited to "
            "memory.kv_fraction 0.5 of the free memory (32.00 GiB of memory: 16.00 GiB free)",
        ),
    ],
)  # fmt: skip
def test_the_log_line_has_the_number_of_tokens_and_the_reason(layers, changes, have, steps, held, line):
    demand = replace(DEMAND, reserved_bytes=steps.num_bytes, **changes)
    sizes = size_kv(layers, held, demand)
    assert explain(sizes, demand, have, steps, layers, torch.float16, held) == f"KV memory: {line}"


def test_host_memory_is_read_from_the_operating_system(tmp_path):
    have = DeviceMemory.read(torch.device("cpu"), root=tmp_path)  # an empty folder, so without the limits of cgroups
    assert have.total_bytes == psutil.virtual_memory().total
    assert have.free_bytes == pytest.approx(psutil.virtual_memory().available, abs=have.total_bytes / 10)
    assert 0 < have.free_bytes < have.total_bytes
    assert have.weight_bytes is None


def sized(config, layers, steps):
    """Size the memory of a float16 model with these layers and a context of 40 tokens."""
    defaults = {
        "model": "demo",
        "cache": {"page_size": 16},
        "scheduling": {"max_running_requests": 2, "prefill_tokens_per_step": 32},
    }
    loaded = EngineConfig.load(defaults | config)
    model = SimpleNamespace(attention_layers=layers)
    registry = Registry.load(loaded.plugins)
    return size_memory(loaded, registry, model.attention_layers, torch.device("cpu"), torch.float16, 40, steps)


@pytest.mark.parametrize(
    ("config", "layers", "num_pages", "num_window_pages"),
    [
        ({}, [FULL], 6, None),  # two rows of 40 tokens
        ({"memory": {"kv_tokens": 70}}, [FULL], 4, None),
        ({"memory": {"kv_tokens": 70, "kv_dtype": "int8"}}, [FULL], 4, None),
        ({}, [FULL, WINDOWED], 6, None),
        # Window pages: a row has 5 pages for 64 tokens and 16 spare ones, and 3 more; a step's prompts need 2; a
        # quarter of all is cached.
        ({"memory": {"kv_tokens": 1600}, "cache": SPLIT}, [FULL, WINDOWED], 100, 2 * 8 + 2 + 25),
        ({"memory": {"kv_tokens": 1600, "window_tokens": 800}, "cache": SPLIT}, [FULL, WINDOWED], 100, 50),
        ({"memory": {"kv_tokens": 1600}, "cache": SPLIT}, [FULL], 100, None),
        ({"memory": {"kv_tokens": 1600}, "cache": SPLIT}, [WINDOWED, replace(WINDOWED, sliding_window=32)], 100, None),
    ],
)
def test_kv_memory_has_the_configured_size(config, layers, num_pages, num_window_pages):
    memory = sized(config, layers, StepMemory())
    assert memory.dtype is KV_DTYPES.get(config.get("memory", {}).get("kv_dtype"), torch.float16)
    assert memory.num_pages == num_pages
    assert (None if memory.window is None else memory.window.num_window_pages) == num_window_pages


def test_memory_for_steps_is_left_free():
    with pytest.raises(ConfigError, match=r"too small for one KV page .* steps need \d+ MiB"):
        sized({}, [FULL], StepMemory(activation_bytes=psutil.virtual_memory().total))
