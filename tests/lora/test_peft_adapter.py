"""Adapters in the format of peft are read with the right factors, and unsupported ones are refused by name."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from graftlm.errors import AdapterError
from graftlm.lora.peft_adapter import read_peft_adapter

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
TARGETS = {f"model.layers.{i}.self_attn.{name}": (8, 16) for i in (0, 1) for name in ("q_proj", "k_proj", "o_proj")}
NAME = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for i in (0, 1):
        for name in CONFIG["target_modules"]:
            tensors[NAME.format(i, name, "A")] = torch.randn((4, 16), generator=generator)
            tensors[NAME.format(i, name, "B")] = torch.randn((8, 4), generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    write_config(tmp_path)
    return tmp_path


def write_config(folder, **fields):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | fields))


def change_tensors(folder, changes):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def read(folder, max_rank=8, dtype=torch.float32):
    return read_peft_adapter(folder, TARGETS, max_rank, dtype)


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"lora_alpha": 3}, (0.75, 0.75)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"q_proj": 1}}, (0.25, 2.0)),
        ({"alpha_pattern": {"layers.0.self_attn.o_proj": 1, "o_proj": 4}}, (2.0, 0.25)),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 4}}, (1.0, 2.0)),
    ],
)
def test_factors_are_scaled_as_configured(folder, fields, scales):
    write_config(folder, **fields)
    factors = read(folder).factors
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, scale in zip(("q_proj", "o_proj"), scales, strict=True):
        pair = factors[f"model.layers.0.self_attn.{name}"]
        assert torch.equal(pair.down, tensors[NAME.format(0, name, "A")])
        torch.testing.assert_close(pair.up, tensors[NAME.format(0, name, "B")] * scale)


def test_a_rank_pattern_sets_rank_and_scale(folder):
    change_tensors(
        folder, {NAME.format(1, "q_proj", "A"): torch.ones(2, 16), NAME.format(1, "q_proj", "B"): torch.ones(8, 2)}
    )
    write_config(folder, rank_pattern={"layers.1.self_attn.q_proj": 2})
    pair = read(folder).factors["model.layers.1.self_attn.q_proj"]
    assert (tuple(pair.down.shape), pair.up[0, 0].item()) == ((2, 16), 4.0)


def test_the_digest_depends_only_on_the_computed_factors(folder):
    before = read(folder).digest
    write_config(folder, lora_dropout=0.5)
    assert read(folder).digest == before
    write_config(folder, lora_alpha=9)
    assert read(folder).digest != before
    write_config(folder)
    change_tensors(folder, {NAME.format(0, "q_proj", "A"): torch.ones(4, 16)})
    assert read(folder).digest != before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True: it is a DoRA adapter"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: it replaces whole modules"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is .*: it changes embeddings"),
        ({"lora_bias": True}, "lora_bias is True: its factors have biases"),
        ({"bias": "all"}, "bias is 'all': it changes biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is .*: it repeats layers"),
        ({"target_parameters": ["experts"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4': .*changed weights"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only LORA is supported"),
        ({"r": "four"}, "is not the configuration of a LoRA adapter: r: "),
        ({"r": 0}, "r: Input should be greater than or equal to 1"),
        ({"r": 10**30}, "r: Input should be less"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: Input should be greater than or equal to 1"),
        ({"use_rslora": True, "rank_pattern": {"q_proj": -4}}, "rank_pattern.q_proj: Input should be greater"),
        ({"lora_alpha": float("nan")}, "lora_alpha: Input should be a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha: Input should be a finite number"),
        ({"alpha_pattern": {"o_proj": float("nan")}}, "alpha_pattern.o_proj: Input should be a finite number"),
        ({"lora_alpha": 1e39}, r"o_proj.lora_B.weight' times 2.5e\+38 is not finite in torch.float32"),
        ({"lora_alpha": 1e300}, r"o_proj.lora_B.weight' times 2.5e\+299 is not finite in torch.float32"),
        ({"alpha_pattern": {"(": 1}}, r"'\(' is not a regular expression"),
        ({"r": 2}, r"o_proj.lora_A.weight' has shape \[4, 16\], expected \[2, 16\]"),
    ],
)
def test_an_unsupported_entry_is_refused_by_name(folder, fields, message):
    write_config(folder, **fields)
    with pytest.raises(AdapterError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NAME.format(0, "q_proj", "B"): None}, r"lacks 'base_model.*q_proj.lora_B.weight'"),
        (
            {NAME.format(1, "o_proj", "A"): None, NAME.format(1, "o_proj", "B"): None},
            "lacks the factors of model.layers.1.self_attn.o_proj, which adapter_config.json lists",
        ),
        ({NAME.format(0, "q_proj", "A"): torch.ones(4, 32)}, r"has shape \[4, 32\], expected \[4, 16\]"),
        ({NAME.format(0, "q_proj", "B"): torch.ones(9, 4)}, r"has shape \[9, 4\], expected \[8, 4\]"),
        ({NAME.format(7, "q_proj", "A"): torch.ones(4, 16)}, "adapts model.layers.7.self_attn.q_proj, which this"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 16)}, "adapts lm_head, .* k_proj, o_proj"),
        ({"base_model.model.lm_head.weight": torch.ones(4, 16)}, "has 'base_model.model.lm_head.weight'"),
        ({"base_model.model.model.embed.lora_embedding_A": torch.ones(4, 9)}, "adapters of embeddings"),
        ({NAME.format(0, "q_proj", "magnitude_vector"): torch.ones(8)}, "DoRA"),
        ({NAME.format(0, "q_proj", "A"): torch.full((4, 16), float("nan"))}, "must have finite"),
        ({NAME.format(0, "q_proj", "A"): torch.ones(4, 16, dtype=torch.int8)}, "got torch.int8"),
    ],
)
def test_missing_surplus_or_misshapen_tensors_are_refused_by_name(folder, changes, message):
    change_tensors(folder, changes)
    with pytest.raises(AdapterError, match=message):
        read(folder)


@pytest.mark.parametrize(("factor", "scale"), [("A", ""), ("B", " times 2")])
def test_factors_outside_the_range_of_the_models_dtype_are_refused(folder, factor, scale):
    name = NAME.format(1, "q_proj", factor)
    change_tensors(folder, {name: torch.full((4, 16) if factor == "A" else (8, 4), 66000.0)})
    weights = read(folder, dtype=torch.bfloat16)
    assert {t.dtype for pair in weights.factors.values() for t in (pair.down, pair.up)} == {torch.bfloat16}
    with pytest.raises(AdapterError, match=f"'{name}'{scale} is not finite in torch.float16, the model's dtype"):
        read(folder, dtype=torch.float16)


def test_unknown_entries_cause_a_warning_with_their_names(folder, caplog):
    harmless = {"lora_dropout": 0.1, "base_model_name_or_path": "else/where", "task_type": "CAUSAL_LM", "new": None}
    write_config(folder, **harmless)
    read(folder)
    assert not caplog.records
    write_config(folder, **harmless, use_new_thing=True, monteclora_config={"a": 1})
    read(folder)
    (record,) = caplog.records
    assert (record.levelno, "unknown entries are ignored: monteclora_config, use_new_thing" in record.getMessage()) == (
        logging.WARNING,
        True,
    )


def test_all_entries_that_peft_writes_are_known(folder, caplog):
    LoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", r=4).save_pretrained(folder)
    read(folder)
    assert not caplog.records


def test_a_rank_above_the_configured_maximum_is_refused(folder):
    with pytest.raises(AdapterError, match=r"o_proj has rank 4, the maximum is 3\. Increase lora\.max_rank"):
        read(folder, max_rank=3)


def pipe_as_config(folder):
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: folder.rename(folder.with_name("gone")), "No adapter at"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be read: No such file"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "json is not the configuration of a LoRA adapter",
        ),
        (pipe_as_config, "adapter_config.json is not a regular file"),
        (
            lambda folder: os.truncate(folder / "adapter_config.json", 1 << 30),
            "1073741824 bytes, expected at most 4194304",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"pickled weights \(.bin\) are not supported"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
            "truncated or not",
        ),
        (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "has no tensors"),
    ],
)
def test_missing_or_damaged_files_are_reported(folder, damage, message):
    damage(folder)
    with pytest.raises(AdapterError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [("x" * 4000, "cannot be read: File name too long"), ("~nobody-of-this-name/a", "Could not determine home")],
)
def test_paths_without_an_adapter_are_adapter_errors(path, message):
    with pytest.raises(AdapterError, match=message):
        read(Path(path))
