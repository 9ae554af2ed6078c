import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.checkpoint import load_model_config, torch_dtype
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, ConfigError, UnsupportedArchitectureError

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


class TestConfig:
    def test_named_fields_and_raw_entries_are_read(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", CONFIG | {"hidden_size": 8})
        config = load_model_config(tmp_path)
        assert config.architectures == ("LlamaForCausalLM",)
        assert (config.vocab_size, config.max_position_embeddings) == (100, 64)
        assert config.raw["hidden_size"] == 8
        assert config.eos_token_ids == ()

    @pytest.mark.parametrize(
        ("config_eos", "generation", "expected"),
        [
            (None, None, ()),
            (2, None, (2,)),
            ([2, 3], None, (2, 3)),
            (2, {}, (2,)),
            (2, {"eos_token_id": 2}, (2,)),
            (2, {"eos_token_id": [7, 2]}, (2, 7)),
            (None, {"eos_token_id": 0}, (0,)),
        ],
    )
    def test_end_of_sequence_tokens_come_from_both_files(
        self, config_eos: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
    ) -> None:
        write_json(tmp_path / "config.json", CONFIG | {"eos_token_id": config_eos})
        if generation is not None:
            write_json(tmp_path / "generation_config.json", generation)
        assert load_model_config(tmp_path).eos_token_ids == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "JSON object, got list"),
            ("[" * 100_000, "nested too deeply"),
            ("{}", "architectures"),
            (json.dumps(CONFIG | {"vocab_size": None}), "vocab_size"),
            (json.dumps(CONFIG | {"max_position_embeddings": 0}), "max_position_embeddings"),
            (json.dumps(CONFIG | {"eos_token_id": "</s>"}), "eos_token_id"),
        ],
    )
    def test_the_error_for_a_bad_config_names_file_and_reason(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json.*{message}"):
            load_model_config(tmp_path)

    def test_a_missing_config_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
            load_model_config(tmp_path)

    def test_a_model_with_a_tower_has_the_configuration_of_its_text_model(self, tmp_path: Path) -> None:
        text = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "eos_token_id": 5}
        whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
        write_json(tmp_path / "config.json", whole | {"dtype": "float16", "tie_word_embeddings": True})
        config = load_model_config(tmp_path)
        assert (config.architectures, config.eos_token_ids) == (("Qwen2ForCausalLM",), (5,))
        assert config.vocab_size == 151936  # the default of Qwen 2
        assert (config.raw["tie_word_embeddings"], config.raw["dtype"]) == (True, "float16")
        assert config.media is not None
        assert config.media["model_type"] == "llava"

    def test_an_unknown_text_model_is_refused(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", {"architectures": ["Unknown"], "text_config": CONFIG})
        with pytest.raises(UnsupportedArchitectureError, match="model type None is unknown to Transformers"):
            load_model_config(tmp_path)

    def test_the_config_is_read_without_torch(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", CONFIG)
        program = (
            "import sys, pathlib; from graftlm.checkpoint import load_model_config;"
            "load_model_config(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0


class TestDtype:
    @pytest.mark.parametrize(
        ("name", "raw", "expected"),
        [
            ("auto", {}, torch.float32),
            ("auto", {"dtype": "bfloat16"}, torch.bfloat16),
            ("auto", {"torch_dtype": "float16"}, torch.float16),
            ("auto", {"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
            ("float32", {"dtype": "bfloat16"}, torch.float32),
            ("bfloat16", {}, torch.bfloat16),
            ("float16", {"dtype": "float8_e4m3fn"}, torch.float16),
        ],
    )
    def test_auto_selects_the_checkpoints_dtype(self, name: str, raw: dict[str, str], expected: torch.dtype) -> None:
        assert torch_dtype(name, ModelConfig(("A",), 1, 1, raw=raw)) == expected

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'int4'. Available: auto, float32"):
            torch_dtype("int4", ModelConfig(("A",), 1, 1))
        with pytest.raises(CheckpointError, match="float8"):
            torch_dtype("auto", ModelConfig(("A",), 1, 1, raw={"dtype": "float8_e4m3fn"}))


def test_state_space_models_without_attention_need_no_context_length(tmp_path: Path) -> None:
    entries = {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 100, "state_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert load_model_config(tmp_path).max_position_embeddings == 131_072
    (tmp_path / "config.json").write_text(json.dumps(entries | {"num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "good", "0": "bad"}}, ("bad", "good")),
        ({"id2label": {"0": "reward"}, "num_labels": 5}, ("reward",)),
    ],
)
def test_labels_are_read_in_the_order_of_the_score_heads_rows(raw, labels):
    assert ModelConfig(("X",), 10, 10, raw=raw).labels == labels


@pytest.mark.parametrize("names", [{}, {"1": "a"}, {"0": "a", "2": "b"}, ["a"], 3])
def test_labels_without_a_complete_order_are_refused(names):
    with pytest.raises(CheckpointError, match="id2label as a name for each of 0, 1"):
        _ = ModelConfig(("X",), 10, 10, raw={"id2label": names}).labels
