"""Writes the files of the demo checkpoint in a layout that old and new versions of Transformers can read."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm.demo.tokenizer import BOS, CHAT_TEMPLATE, END, EOS, PAD, ROLES


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights, configuration files and tokenizer into a folder; existing files are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # Transformers before version 5 reads these two names.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    _write_json(out / "config.json", config)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "additional_special_tokens": [*ROLES, END]}
    _write_json(out / "special_tokens_map.json", named)
    _write_json(
        out / "tokenizer_config.json",
        {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": tokenizer.model_max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
