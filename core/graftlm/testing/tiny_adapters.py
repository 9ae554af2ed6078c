"""Writes small random low-rank adapters with the library `peft`, and merges them into models."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["write_tiny_adapter"]


def write_tiny_adapter(
    directory: Path, checkpoint: Path, seed: int = 0, *, deviation: float = 0.2, **config: Any
) -> nn.Module:
    """Write a random adapter for a checkpoint; return the checkpoint's model with the adapter merged into its weights.

    Both low-rank factors have large random values, so that the adapter changes most tokens. A new adapter for
    training has one factor of zeros and changes nothing.

    Args:
        directory: folder of the adapter. It is created if necessary, and its files are replaced.
        checkpoint: folder of the model; its files are not changed.
        seed: seed of the random factors. Equal arguments give equal adapters.
        deviation: standard deviation of the factors.
        config: arguments of `peft.LoraConfig`: r, lora_alpha, target_modules and so on.

    Returns:
        A model of Transformers in float32 with the merged weights.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses the old name of an attribute of Transformers
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    model.save_pretrained(str(directory))
    merged: nn.Module = model.merge_and_unload()
    return merged
