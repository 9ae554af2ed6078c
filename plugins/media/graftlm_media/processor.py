"""Prepares pictures with the processor of a checkpoint in Transformers."""

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import MediaContext, MediaProcessor, MediaTower, Picture, PreparedMedia
from graftlm.errors import CheckpointError

__all__ = ["TransformersMedia", "arrays_of", "input_names", "load_error", "settings_of"]


class TransformersMedia(MediaProcessor):
    """The processor and the tower of a checkpoint.

    Args:
        context: the checkpoint.

    Raises:
        CheckpointError: Transformers cannot load the configuration or the processor.
    """

    def __init__(self, context: MediaContext) -> None:
        from transformers import AutoConfig, AutoModel, AutoProcessor

        trust = context.code_folder is not None
        try:
            self._config = AutoConfig.from_pretrained(context.path, local_files_only=True, trust_remote_code=trust)
            self._processor: Any = AutoProcessor.from_pretrained(
                context.path, local_files_only=True, trust_remote_code=trust
            )
            kind = AutoModel._model_mapping[type(self._config)]
        except Exception as error:  # the loaders may raise any exception of their parsers
            raise load_error(context.path, error) from error
        self._input_names = input_names(kind)
        self._options = dict(getattr(type(self._processor), "images_kwargs", None) or {})
        entries = {"image_seq_len": getattr(self._processor, "image_seq_len", None)}
        self._settings = settings_of(self._processor.image_processor, entries)

    @property
    def marker(self) -> str:
        """The processor's image token."""
        return str(self._processor.image_token)

    @property
    def feature_token_id(self) -> int:
        """The configuration's image token."""
        return int(self._config.image_token_id)

    @property
    def settings(self) -> bytes:
        """The class and the entries of the image processor, as JSON."""
        return self._settings

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template."""
        template = self._processor.chat_template
        return template if isinstance(template, str) else None

    def prepare(self, picture: Picture) -> PreparedMedia:
        """Call the image processor."""
        from PIL import Image

        processor = self._processor
        images, *_ = processor.prepare_inputs_layout(images=[Image.fromarray(picture)], text=None)
        found = processor.image_processor(images, **self._options, return_tensors="pt")
        text: str = processor.replace_image_token(found, image_idx=0)
        image_token = processor.tokenizer.convert_ids_to_tokens(self.feature_token_id)
        return PreparedMedia(text, text.count(image_token), arrays_of(found, self._input_names))

    def load_tower(self, weights: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> MediaTower:
        """Load the tower and the projector."""
        from graftlm_media.tower import TransformersTower

        return TransformersTower(self._config, weights, device, dtype)


def input_names(kind: type[Any]) -> list[str]:
    """Return the names of the inputs of a model class's `get_image_features`."""
    names = inspect.signature(kind.get_image_features).parameters
    return [name for name, one in names.items() if one.kind is not one.VAR_KEYWORD and name != "self"]


def arrays_of(found: Mapping[str, Any], names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return the tower's inputs among the image processor's results."""
    return {name: np.ascontiguousarray(torch.as_tensor(found[name]).numpy()) for name in names if name in found}


def settings_of(image_processor: Any, entries: Mapping[str, Any]) -> bytes:
    """Return the class and the entries of an image processor, and other entries, as bytes."""
    entries = image_processor.to_dict() | dict(entries)
    return f"{type(image_processor).__name__} {json.dumps(entries, sort_keys=True, default=str)}".encode()


def load_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a processor that Transformers cannot load."""
    return CheckpointError(f"cannot load the processor of {path}: {' '.join(str(error).split())[:300]}")
