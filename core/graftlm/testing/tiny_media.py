"""Writes small random checkpoints of models with a tower for pictures, and runs them with Transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from graftlm.contracts import Picture
from graftlm.testing.tiny_models import draw_weights, write_tokenizer

__all__ = ["MediaKind", "MediaOracle", "random_picture", "write_media_checkpoint"]

MediaKind: TypeAlias = Literal["llava", "llava_next", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl"]

_VOCAB_SIZE = 384
_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 1,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
}
_CLASSES: dict[str, str] = {
    "llava": "LlavaForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_media_checkpoint(
    directory: Path,
    kind: MediaKind = "llava",
    seed: int = 0,
    *,
    adapt: Callable[[Any, Any], None] = lambda config, processor: None,
    initializer_range: float = 0.3,
) -> Path:
    """Write a checkpoint with a tokenizer, a processor and a chat template.

    Args:
        directory: folder of the checkpoint. It is created if necessary, and its files are replaced.
        kind: the class of the model.
        seed: seed of the weights.
        adapt: function that changes the sizes in the configuration and in the processor before they are used.
        initializer_range: standard deviation of all weights.

    Returns:
        `directory`.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, 320, _TEXT["max_position_embeddings"])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = _TEMPLATE
    processor = _PROCESSORS[kind](transformers, tokenizer)
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config = _CONFIGS[kind](transformers, image_token_id)
    adapt(config, processor)
    with torch.random.fork_rng(devices=[]):  # the constructor draws random weights, which are replaced below
        model = getattr(transformers, _CLASSES[kind])._from_config(config, dtype=torch.float32)
    draw_weights(model, seed, initializer_range, norm_mean=1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    if kind.startswith("qwen"):  # its processor is an image processor
        tokenizer.save_pretrained(directory)
    return directory


def random_picture(width: int, height: int, seed: int = 0) -> Picture:
    """Return a picture with random rectangles, uint8 [H, W, 3]."""
    rng = np.random.default_rng(seed)
    picture = np.full((height, width, 3), rng.integers(256, size=3), dtype=np.uint8)
    for _ in range(6):
        left, top = rng.integers(width), rng.integers(height)
        picture[top : top + rng.integers(1, height + 1), left : left + rng.integers(1, width + 1)] = rng.integers(
            256, size=3
        )
    return picture


class MediaOracle:
    """A checkpoint that runs with Transformers on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        import transformers

        self._is_qwen = transformers.AutoConfig.from_pretrained(checkpoint).model_type.startswith("qwen")
        auto = transformers.AutoImageProcessor if self._is_qwen else transformers.AutoProcessor
        self.processor: Any = auto.from_pretrained(checkpoint)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
        kind = transformers.AutoModelForImageTextToText
        self._model: Any = kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

    def generate(self, text: str, pictures: Sequence[Picture], max_tokens: int) -> list[int]:
        """Return the greedy continuation of a text with one "<image>" for each picture."""
        from PIL import Image

        images = [Image.fromarray(picture) for picture in pictures]
        inputs = self._qwen_inputs(text, images) if self._is_qwen else None
        if inputs is None:
            inputs = self.processor(text=text, images=images or None, return_tensors="pt")
        with torch.no_grad():
            output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
        generated: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return generated

    def _qwen_inputs(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """Return what Qwen's processor, which needs torchvision, would return."""
        found = self.processor(images, return_tensors="pt") if images else {}
        sizes = (found["image_grid_thw"].prod(dim=1) // self.processor.merge_size**2).tolist() if images else []
        first, *rest = text.split("<image>")
        whole = first + "".join("<image>" * size + piece for size, piece in zip(sizes, rest, strict=True))
        ids = torch.tensor([self._tokenizer(whole)["input_ids"]])
        kinds = (ids == self._tokenizer.convert_tokens_to_ids("<image>")).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **found}


def _llava_config(transformers: Any, image_token_id: int) -> Any:
    vision = _VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 32}
    return transformers.LlavaConfig(
        text_config=_TEXT, vision_config=vision, image_token_index=image_token_id, image_seq_length=16
    )


def _llava_processor(transformers: Any, tokenizer: Any) -> Any:
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )


def _idefics3_config(transformers: Any, image_token_id: int) -> Any:
    vision = _VISION | {"image_size": 28, "patch_size": 7}
    return transformers.Idefics3Config(
        text_config=_TEXT, vision_config=vision, image_token_id=image_token_id, scale_factor=2
    )


def _idefics3_processor(transformers: Any, tokenizer: Any) -> Any:
    image_processor = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4, chat_template=_TEMPLATE)


def _smolvlm_config(transformers: Any, image_token_id: int) -> Any:
    vision = _VISION | {"image_size": 28, "patch_size": 7}
    return transformers.SmolVLMConfig(
        text_config=_TEXT, vision_config=vision, image_token_id=image_token_id, scale_factor=2
    )


def _llava_next_config(transformers: Any, image_token_id: int) -> Any:
    vision = _VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 32}
    return transformers.LlavaNextConfig(
        text_config=_TEXT,
        vision_config=vision,
        image_token_index=image_token_id,
        image_grid_pinpoints=_PINPOINTS,
    )


def _llava_next_processor(transformers: Any, tokenizer: Any) -> Any:
    return transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=_PINPOINTS
        ),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )


def _qwen_text(model_type: str) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return {name: value for name, value in _TEXT.items() if name != "head_dim"} | {
        "model_type": model_type,
        "rope_parameters": rope,
    }


def _qwen2_vl_config(transformers: Any, image_token_id: int) -> Any:
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7}
    return transformers.Qwen2VLConfig(
        text_config=_qwen_text("qwen2_vl_text"), vision_config=vision, image_token_id=image_token_id
    )


def _qwen2_5_vl_config(transformers: Any, image_token_id: int) -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 7,
        "out_hidden_size": 64,
        "window_size": 28,
        "fullatt_block_indexes": [2],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=_qwen_text("qwen2_5_vl_text"), vision_config=vision, image_token_id=image_token_id
    )


def _qwen_processor(transformers: Any, tokenizer: Any) -> Any:
    return transformers.Qwen2VLImageProcessor(patch_size=7, min_pixels=28 * 28, max_pixels=28 * 28 * 6)


_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_CONFIGS = {"llava": _llava_config, "idefics3": _idefics3_config, "smolvlm": _smolvlm_config}
_CONFIGS |= {"llava_next": _llava_next_config, "qwen2_vl": _qwen2_vl_config, "qwen2_5_vl": _qwen2_5_vl_config}
_PROCESSORS = {"llava": _llava_processor, "idefics3": _idefics3_processor, "smolvlm": _idefics3_processor}
_PROCESSORS |= {"llava_next": _llava_next_processor, "qwen2_vl": _qwen_processor, "qwen2_5_vl": _qwen_processor}
