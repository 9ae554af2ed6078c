"""The oracle for models, which runs the same checkpoint with Hugging Face Transformers."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HuggingFaceModel"]


class HuggingFaceModel:
    """A checkpoint that runs with Transformers on the CPU, with "eager" attention.

    Args:
        checkpoint: folder of the checkpoint, or a loaded model with "eager" attention.
        dtype: dtype of the weights; it has no effect on a loaded model.
    """

    def __init__(self, checkpoint: Path | nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = checkpoint.eval() if isinstance(checkpoint, nn.Module) else _load(checkpoint, dtype)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits at every position, [tokens, V]."""
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    def generate(
        self, token_ids: Sequence[int], max_tokens: int, held: Callable[[Tensor], Tensor] | None = None
    ) -> list[int]:
        """Return the greedy continuation of a prompt.

        Args:
            token_ids: the prompt.
            max_tokens: maximum number of generated tokens.
            held: function that is applied to keys and to values, [..., D], before they are written to the cache;
                attention reads the results. With such a function, an end-of-sequence token does not end the output.
                None: keys and values are cached unchanged.

        Returns:
            The generated token ids. Without `held`, the output ends with the first end-of-sequence token, if any.
        """
        if held is not None:
            return self._generate_from_held(token_ids, max_tokens, held)
        # Transformers' `generate` returns the same tokens, but takes about twice as long as this loop.
        inputs = torch.tensor([list(token_ids)])
        cache: dict[str, Any] = {}
        generated: list[int] = []
        with torch.no_grad():
            while len(generated) < max_tokens and self._ends.isdisjoint(generated[-1:]):
                output = self._model(inputs, **cache, use_cache=True, logits_to_keep=1)
                cache = {name: output[name] for name in ("past_key_values", "cache_params") if name in output}
                generated.append(int(output.logits[0, -1].argmax()))
                inputs = torch.tensor([generated[-1:]])
        return generated

    @cached_property
    def _ends(self) -> frozenset[int]:
        ends = self._model.generation_config.eos_token_id
        return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)

    def _generate_from_held(
        self, token_ids: Sequence[int], max_tokens: int, held: Callable[[Tensor], Tensor]
    ) -> list[int]:
        prompt = torch.tensor([list(token_ids)])
        options = {"past_key_values": _cache_with(held), "eos_token_id": None}
        with torch.no_grad():
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, **options
            )
        generated: list[int] = output[0, len(token_ids) :].tolist()
        return generated


def _load(checkpoint: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()


def _cache_with(held: Callable[[Tensor], Tensor]) -> Any:
    """Return a cache for Transformers that applies a function to keys and values before they are written."""
    from transformers import DynamicCache

    class Cache(DynamicCache):  # type: ignore[misc]  # transformers has no types for it
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(held(key_states), held(value_states), *args, **kwargs)

    return Cache()
