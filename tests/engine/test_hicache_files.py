"""Conversations continue after a restart from blocks in files, whether or not the files are damaged."""

import shutil
import time

import numpy as np
import pytest

from graftlm import Engine, EngineConfig, SamplingParams

BLOCK_TOKENS = 32


def make_engine(path, folder, *, page_size=16, host_tokens=4096, **storage):
    options = {
        "host_tokens": host_tokens,
        "block_tokens": BLOCK_TOKENS,
        "storage": {"name": "file", "options": {"path": str(folder)}, "prefetch": "wait_complete", **storage},
    }
    return Engine(
        EngineConfig.load(
            {"model": {"path": str(path), "dtype": "float32", "device": "cpu"}},
            cache={"name": "hicache", "page_size": page_size, "options": options},
            memory={"kv_tokens": 2048},
        )
    )


def ask(engine, prompt):
    [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    return list(output.token_ids), output.usage


@pytest.fixture
def first_turn(checkpoint, tmp_path):
    """Return a prompt, its answer, and the folder that an engine has written."""
    prompt = np.random.default_rng(0).integers(1, 300, 200).tolist()
    folder = tmp_path / "blocks"
    with make_engine(checkpoint("llama"), folder) as engine:
        answer, usage = ask(engine, prompt)
        assert usage.cached_tokens == 0
    return prompt, answer, folder


def block_files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_restarted_engine_reuses_blocks_for_any_page_size(checkpoint, first_turn, page_size):
    prompt, answer, folder = first_turn
    with make_engine(checkpoint("llama"), folder, page_size=page_size) as engine:
        again, usage = ask(engine, prompt)
    assert again == answer
    assert usage.cached_tokens_by_tier == {"device": 0, "host": 0, "storage": 192}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def tear(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def remove(file):
    file.unlink()


@pytest.mark.parametrize(("damage", "is_read"), [(flip, True), (tear, True), (empty, False), (remove, False)])
@pytest.mark.parametrize("which", [slice(None), slice(1)])
def test_damaged_files_only_cost_speed(checkpoint, first_turn, damage, is_read, which):
    prompt, answer, folder = first_turn
    files = block_files(folder)[which]
    assert files
    for file in files:
        damage(file)
    with make_engine(checkpoint("llama"), folder) as engine:
        again, usage = ask(engine, prompt)
        tiers = engine.stats().tiers
        repeated, later = ask(engine, prompt)
    assert again == repeated == answer
    assert usage.cached_tokens < 192
    assert usage.cached_tokens == usage.cached_storage_tokens
    assert later.cached_tokens == 192
    assert tiers.storage_corrupt > 0 or not is_read


def test_a_folder_deleted_at_run_time_only_costs_speed(checkpoint, first_turn):
    prompt, answer, folder = first_turn
    with make_engine(checkpoint("llama"), folder) as engine:
        shutil.rmtree(folder)
        again, usage = ask(engine, prompt)
        assert again == answer
        assert usage.cached_tokens == 0


def test_the_files_of_another_model_are_not_read(checkpoint, first_turn):
    prompt, _, folder = first_turn
    with make_engine(checkpoint("qwen2"), folder) as engine:
        _, usage = ask(engine, prompt)
    assert usage.cached_tokens == 0


def test_two_engines_share_a_folder(checkpoint, first_turn):
    prompt, answer, folder = first_turn
    path = checkpoint("llama")
    longer = prompt + answer + prompt
    with make_engine(path, folder) as one, make_engine(path, folder) as other:
        first, _ = ask(one, longer)
        limit = time.monotonic() + 20
        while one.stats().tiers.storage_stored < (len(longer) - 192) // BLOCK_TOKENS:  # a separate thread writes them
            assert time.monotonic() < limit
        second, usage = ask(other, longer)
    assert first == second
    assert usage.cached_storage_tokens == (len(longer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
