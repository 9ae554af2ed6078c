"""The tower and the projector of a checkpoint in Transformers, without the text model."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from graftlm.contracts import MediaTower
from graftlm.errors import CheckpointError, WeightError

__all__ = ["TransformersTower"]

#: Names of the text model in Transformers' classes.
_TEXT_MODELS: Final = ("language_model", "text_model")
#: Parts of names in files that the modules' names lack.
_DROPPED_PARTS: Final = (re.compile(r"^model\."), re.compile(r"(?<=vision_tower\.)vision_model\."))
_NAMES_SHOWN: Final = 5


class TransformersTower(MediaTower):
    """Runs the tower and the projector of a Transformers model.

    Args:
        config: the checkpoint's configuration as loaded by Transformers.
        weights: (name, tensor) of the tower in the checkpoint's files.
        device, dtype: device and dtype of the weights.

    Raises:
        WeightError: a tensor is missing or of the wrong shape.
    """

    def __init__(
        self, config: Any, weights: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model = _without_text(config, dtype)
        self._dtype = dtype
        self._width = int(config.get_text_config().hidden_size)
        _load(self._model, weights)
        self._model.to(device).eval().requires_grad_(False)
        self._stages = _layers(self._model)

    @property
    def width(self) -> int:
        """The hidden size of the text model."""
        return self._width

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The tower's layers."""
        return self._stages

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Call `get_image_features`."""
        given = {name: _in_dtype(tensor, self._dtype) for name, tensor in inputs.items()}
        found = self._model.get_image_features(**given, return_dict=True).pooler_output
        parts = [found] if isinstance(found, Tensor) else list(found)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _without_text(config: Any, dtype: torch.dtype) -> Any:
    """Return the model with uninitialized weights and without its text model."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.intermediate_size, text.pad_token_id = 1, 8, 8, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    try:
        with no_init_weights():
            model = AutoModel.from_config(small, dtype=dtype, attn_implementation="sdpa")
    except Exception as error:  # a model class may raise any exception for its configuration
        raise CheckpointError(f"Transformers cannot create the tower of the checkpoint: {str(error)[:300]}") from error
    for name in _TEXT_MODELS:
        if name in dict(model.named_children()):
            setattr(model, name, None)
    return model


def _load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    targets = model.state_dict()
    missing = set(targets)
    for name, tensor in weights:
        target = _target(name, targets)
        if target is None:
            continue  # a part that this configuration does not use, such as a pooling head
        if targets[target].shape != tensor.shape:
            raise WeightError(
                f"The checkpoint's {name!r} has shape {list(tensor.shape)}, but config.json requires "
                f"{list(targets[target].shape)}"
            )
        targets[target].copy_(tensor)
        missing.discard(target)
    if missing:
        shown = ", ".join(repr(name) for name in sorted(missing)[:_NAMES_SHOWN])
        raise WeightError(f"The checkpoint lacks {len(missing)} tensors of its tower for pictures: {shown}")


def _target(name: str, targets: Mapping[str, Tensor]) -> str | None:
    """Return the module's name of a tensor in the files; None if the module has no such tensor."""
    for pattern in (None, *_DROPPED_PARTS):
        name = name if pattern is None else pattern.sub("", name)
        if name in targets:
            return name
    return None


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the longest list of modules, which are called in order."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest
