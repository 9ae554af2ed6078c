"""Small random low-rank adapters, saved by the `peft` library, and the models that result from merging them."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["write_tiny_adapter"]


def write_tiny_adapter(
    directory: Path, checkpoint: Path, seed: int = 0, *, deviation: float = 0.2, **config: Any
) -> nn.Module:
    """Write an adapter of a checkpoint, and return the checkpoint's model with the adapter merged into it.

    Both factors are drawn, wide, so that the adapter changes most tokens; training would begin with one of them zero.

    Args:
        directory: is created; files in it are replaced.
        checkpoint: folder of the model, which is left as it is.
        seed: of the factors. Equal arguments give equal adapters.
        deviation: standard deviation of the factors.
        config: arguments of `peft.LoraConfig`: r, lora_alpha, target_modules and so on.

    Returns: a model of Transformers in float32, with the weights that the adapter makes of it.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks Transformers for an attribute by its old name
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    model.save_pretrained(str(directory))
    merged: nn.Module = model.merge_and_unload()
    return merged
