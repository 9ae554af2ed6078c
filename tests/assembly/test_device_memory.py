"""Configured memory is refused above the device's total, and causes a warning above the free memory."""

import logging
from dataclasses import replace

import psutil
import pytest
import torch

from graftlm import Engine
from graftlm.assembly.adapters import make_adapters
from graftlm.assembly.device_memory import DeviceMemory
from graftlm.assembly.kv_memory import check_kv_fits
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionLayer
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, size_kv
from graftlm.layers import Linear
from graftlm.memory import WindowSpan

CPU = torch.device("cpu")
MIB = 1 << 20
FULL = AttentionLayer(layer_id=0, num_heads=8, num_kv_heads=8, head_dim=64, scale=1.0)  # 2,048 bytes per token
WINDOWED = replace(FULL, layer_id=1, sliding_window=64)
DEMAND = KVDemand(
    kv_tokens=None, window_tokens=None, kv_fraction=0.5, free_bytes=16 * MIB, page_size=16, num_rows=2,
    context_len=64, prefill_tokens=64,
)  # fmt: skip
HAVE = DeviceMemory(32 * MIB, 16 * MIB, None)  # the total fits 16,384 tokens of one layer, the free memory 8,192


def check(memory, layers=(FULL,), **changes):
    demand = replace(DEMAND, **memory, **changes)
    sizes = size_kv(layers, torch.float16, demand)
    check_kv_fits(EngineConfig(memory=memory), sizes, demand, HAVE, layers, torch.float16)


@pytest.mark.parametrize("num_tokens", [16, 8192])
def test_memory_up_to_the_free_size_is_accepted(num_tokens, caplog):
    check({"kv_tokens": num_tokens})
    assert caplog.messages == []


@pytest.mark.parametrize("num_tokens", [8208, 16384])
def test_memory_above_the_free_size_causes_a_warning(num_tokens, caplog):
    check({"kv_tokens": num_tokens})
    (message,) = caplog.messages
    assert f"memory.kv_tokens: {num_tokens:,} tokens need 0.0" in message
    assert message.endswith(
        "but the memory has 0.03 GiB, of which 0.02 GiB are free. The largest value that fits is 8,192"
    )
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("num_tokens", [16400, 280_000, 900_000_000_000, 10**30, 10**400])
def test_memory_above_the_total_is_refused(num_tokens):
    with pytest.raises(ConfigError, match=r"memory\.kv_tokens: .* The largest value that fits is 8,192$") as caught:
        check({"kv_tokens": num_tokens})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("num_tokens", [17_000, 900_000_000_000, 10**400])
def test_window_tokens_above_the_total_are_refused(num_tokens):
    memory = {"kv_tokens": 1600, "window_tokens": num_tokens}
    with pytest.raises(ConfigError, match=r"memory\.window_tokens: .* The largest value that fits is 8,192$"):
        check(memory, (FULL, WINDOWED), span=WindowSpan(64, 16))


def test_window_memory_counts_in_the_largest_value_that_fits():
    span = WindowSpan(64, 16)
    with pytest.raises(ConfigError, match="The largest value that fits is") as caught:
        check({"kv_tokens": 100_000}, (FULL, WINDOWED), span=span)
    largest = int(str(caught.value).rpartition(" ")[2].replace(",", ""))
    check({"kv_tokens": largest}, (FULL, WINDOWED), span=span)
    sizes = size_kv((FULL, WINDOWED), torch.float16, replace(DEMAND, kv_tokens=largest + 16, span=span))
    assert (sizes.num_pages + sizes.num_window_pages) * 16 * 2048 > HAVE.free_bytes


def test_more_pages_than_page_ids_are_refused():
    have = DeviceMemory(1 << 60, 1 << 60, None)
    memory = {"kv_tokens": 1 << 36}
    demand = replace(DEMAND, **memory)
    sizes = size_kv([FULL], torch.float16, demand)
    with pytest.raises(ConfigError, match=r"more than 2,147,483,647 pages, expected at most 34,359,738,352"):
        check_kv_fits(EngineConfig(memory=memory), sizes, demand, have, [FULL], torch.float16)


@pytest.mark.parametrize("num_tokens", [10**11, 9 * 10**11, 10**30])
def test_an_engine_refuses_kv_memory_above_the_machines_total(num_tokens, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: demo\nmemory:\n  kv_tokens: {num_tokens}\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml:3: memory\.kv_tokens: .*The largest value that fits is"):
        Engine(file)


@pytest.mark.parametrize(
    ("options", "name"), [({"host_tokens": 10**12}, "host_tokens"), ({"host_gib": 1e9}, "host_gib")]
)
def test_an_engine_refuses_host_memory_above_the_machines_total(options, name):
    cache = {"name": "hicache", "options": options}
    with pytest.raises(ConfigError, match=rf"cache\.options\.{name}: .* and .* of KV memory need"):
        Engine(model="demo", memory={"kv_tokens": 1024}, cache=cache)


def test_infinite_host_memory_is_refused():
    with pytest.raises(ConfigError, match=r"host_gib.*finite"):
        Engine(model="demo", cache={"name": "hicache", "options": {"host_gib": float("inf")}})


def test_adapter_memory_above_the_total_is_refused():
    class OneLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(64, {"q_proj": 64}, device=CPU, dtype=torch.float32)
            list(self.layer.weight_slots("model.layers.0."))

    config = EngineConfig(lora={"enabled": True, "max_loaded": 1024, "max_rank": 4096})
    num_replicas = psutil.virtual_memory().total >> 30  # 1 GiB each; the room takes 2 GiB
    with pytest.raises(ConfigError, match=r"lora\.max_loaded: 1024 adapters of rank 4096 need 2\.00 GiB"):
        make_adapters(config, OneLayer(), num_replicas)


def test_replicas_divide_the_memory():
    assert DeviceMemory(32, 16, None).shared_by(4) == DeviceMemory(8, 4, None)


def write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", errors="surrogateescape")


CGROUPS = {
    "v2": {
        "proc/self/cgroup": "0::/app.slice/engine",
        "sys/fs/cgroup/app.slice/memory.max": 64 * MIB,
        "sys/fs/cgroup/app.slice/memory.current": 40 * MIB,
        "sys/fs/cgroup/app.slice/memory.stat": f"anon 5\ninactive_file {3 * MIB}\nactive_file {5 * MIB}\n\nfile x",
        "sys/fs/cgroup/app.slice/engine/memory.max": "max",
    },
    "v1": {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 64 * MIB,
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 40 * MIB,
        "sys/fs/cgroup/memory/box/memory.stat": (
            f"active_file 7\ntotal_inactive_file {3 * MIB}\ntotal_active_file {5 * MIB}"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
    },
    "lines of another form": {
        "proc/self/cgroup": "\nmemory\n4:memory\n::\n0::/\udcff\n0::/",
        "sys/fs/cgroup/memory.max": 64 * MIB,
        "sys/fs/cgroup/memory.current": 32 * MIB,
    },
    "a path that the container does not see": {
        "proc/self/cgroup": "0::/docker/0123",
        "sys/fs/cgroup/memory.max": 64 * MIB,
        "sys/fs/cgroup/memory.current": 32 * MIB,
    },
}


@pytest.mark.parametrize("name", CGROUPS)
def test_in_a_container_the_total_is_the_containers_limit(tmp_path, name):
    write(tmp_path, CGROUPS[name])
    assert DeviceMemory.read(CPU, tmp_path) == DeviceMemory(64 * MIB, 32 * MIB, None)


@pytest.mark.parametrize(
    "files", [{}, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, {"proc/self/cgroup": "0::/x"}]
)
def test_without_a_limit_the_total_is_the_machines_memory(tmp_path, files):
    write(tmp_path, files)
    assert DeviceMemory.read(CPU, tmp_path).total_bytes == psutil.virtual_memory().total
