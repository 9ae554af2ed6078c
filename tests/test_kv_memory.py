"""The log line about the size of KV memory, and the device memory that it reads."""

from dataclasses import replace

import psutil
import pytest
import torch

from graftlm.contracts import AttentionLayer
from graftlm.execution.kv_sizes import KVDemand, size_kv
from graftlm.kv_memory import DeviceMemory, explain
from graftlm.memory import WindowSpan
from graftlm.step_memory import StepMemory

GIB = 1 << 30
FULL = AttentionLayer(layer_id=0, num_heads=8, num_kv_heads=8, head_dim=64, scale=1.0)  # 2,048 bytes a token
WINDOWED = replace(FULL, layer_id=1, sliding_window=64)
DEMAND = KVDemand(
    kv_tokens=None, window_tokens=None, kv_fraction=0.5, free_bytes=16 * GIB, page_size=16, num_rows=64,
    context_len=1 << 20, prefill_tokens=2048,
)  # fmt: skip
DEVICE = DeviceMemory(80 * GIB, 16 * GIB, 60 * GIB)
HOST = DeviceMemory(32 * GIB, 16 * GIB, None)
STEPS = StepMemory(activation_bytes=3 * GIB, graph_bytes=GIB)


@pytest.mark.parametrize(
    ("layers", "changes", "have", "steps", "held", "line"),
    [
        (
            [FULL], {}, HOST, StepMemory(), torch.float16,
            "4,194,304 tokens of 2,048 bytes, what fits into memory.kv_fraction 0.5 of what is free "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {"kv_fraction": 0.95}, DEVICE, STEPS, torch.float16,
            "6,291,456 tokens of 2,048 bytes, what fits beside activations and graphs (80.00 GiB of memory: "
            "60.00 GiB weights, 16.00 GiB free, 3.00 GiB of it kept for activations, 1.00 GiB for graphs)",
        ),
        (
            [FULL], {"context_len": 4096}, DEVICE, STEPS, torch.float16,
            "262,144 tokens of 2,048 bytes, all that 64 requests of 4,096 tokens can use (80.00 GiB of memory: "
            "60.00 GiB weights, 16.00 GiB free, 3.00 GiB of it kept for activations, 1.00 GiB for graphs)",
        ),
        (
            [FULL], {"kv_tokens": 1600}, DEVICE, StepMemory(), torch.float16,
            "1,600 tokens of 2,048 bytes, as memory.kv_tokens says "
            "(80.00 GiB of memory: 60.00 GiB weights, 16.00 GiB free)",
        ),
        (
            [FULL, WINDOWED], {"kv_tokens": 16000, "window_tokens": 1600, "span": WindowSpan(64, 16)},
            HOST, StepMemory(), torch.float16,
            "16,000 tokens of 4,096 bytes, sliding-window layers keep 1,600 of them, as memory.kv_tokens says "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {"kv_tokens": 1600}, HOST, StepMemory(), torch.int8,
            "1,600 tokens of 1,056 bytes in int8, 1.94 times as many as in float16, as memory.kv_tokens says "
            "(32.00 GiB of memory: 16.00 GiB free)",
        ),
        (
            [FULL], {}, HOST, StepMemory(), torch.float8_e4m3fn,
            "8,388,608 tokens of 1,024 bytes in float8_e4m3fn, 2.00 times as many as in float16, what fits into "
            "memory.kv_fraction 0.5 of what is free (32.00 GiB of memory: 16.00 GiB free)",
        ),
    ],
)  # fmt: skip
def test_one_line_has_the_tokens_that_fit_and_the_reason(layers, changes, have, steps, held, line):
    demand = replace(DEMAND, reserved_bytes=steps.num_bytes, **changes)
    sizes = size_kv(layers, held, demand)
    assert explain(sizes, demand, have, steps, layers, torch.float16, held) == f"KV memory: {line}"


def test_host_memory_is_read_from_the_operating_system():
    have = DeviceMemory.read(torch.device("cpu"))
    assert have.total_bytes == psutil.virtual_memory().total
    assert 0 < have.free_bytes <= have.total_bytes
    assert have.weight_bytes is None
