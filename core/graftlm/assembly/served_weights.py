"""The weights that a model serves with: loaded, replaced in place, read back, and told from others."""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.assembly.fingerprint import model_fingerprint
from graftlm.assembly.quantization import QuantizedLayers
from graftlm.assembly.weight_digests import WeightDigests, user_cache_dir
from graftlm.checkpoint import (
    check_same_model,
    iter_weights,
    load_model_config,
    resolve_checkpoint,
    watch_reading,
)
from graftlm.config import EngineConfig
from graftlm.contracts import Model, ModelConfig
from graftlm.errors import EngineError, GraftlmError, RequestError, UnsupportedFeatureError
from graftlm.execution.graphs import ReplayedSteps
from graftlm.layers import frequency_bytes

__all__ = ["NewWeights", "ServedWeights"]

logger = logging.getLogger(__name__)


class NewWeights:
    """Weights that have been checked against a model, and can take the place of its own.

    Attributes:
        path: of the checkpoint that they come from; None: they are tensors in memory.
        tensors: some of the model's, by their names in a checkpoint; None: all of the checkpoint's.
    """

    def __init__(self, path: Path | None, tensors: Mapping[str, Tensor] | None) -> None:
        self.path = path
        self.tensors = tensors

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """Yield them anew each time."""
        if self.path is not None:
            return iter_weights(self.path)
        return (self.tensors or {}).items()


class ServedWeights:
    """Owns how a model's weights change after it was created. `load` and `replace` run where the steps run.

    Weights are checked on a twin of the model that has no memory (PyTorch's meta device), before any is copied: names,
    shapes and kinds that do not fit leave the model as it was.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        model_config: ModelConfig,
        make_twin: Callable[[], Model],
        quantized: QuantizedLayers | None,
        path: Path,
        dtype: torch.dtype,
    ) -> None:
        """Take the model before it is loaded.

        Args:
            make_twin: makes the same model on the meta device.
            quantized: what is converted each time that weights have been loaded.
            path: of the checkpoint that `load` loads.
            dtype: that the model computes in.
        """
        self._config = config
        self._model = model
        self._model_config = model_config
        self._make_twin = make_twin
        self._quantized = quantized
        self._path = self._config_path = path
        self._dtype = dtype
        self._graphs: ReplayedSteps | None = None
        self._fingerprint: bytes | None = None

    def load(self, announce: Callable[[str], None] | None = None) -> None:
        """Load the checkpoint, convert and pack.

        Args:
            announce: hears how far a large one is; None: a bar is shown on a terminal.
        """
        with watch_reading(self._path, announce) as on_read:
            self._model.load_weights(iter_weights(self._path, self._dtype, on_read=on_read))
        self._prepare()

    def captured_in(self, graphs: ReplayedSteps | None) -> None:
        """Note the graphs that compute with these weights."""
        self._graphs = graphs

    def fingerprint(self) -> bytes:
        """Return what tells keys and values of these weights from those of others, 32 bytes.

        Of a checkpoint it is a hash of its content when it was first asked for; tensors from memory get a random one,
        which nobody else has.

        Raises:
            OSError: a file of the checkpoint cannot be read.
        """
        if self._fingerprint is None:
            digests = WeightDigests(user_cache_dir(os.environ) / "weights.json")
            layers = self._model.attention_layers
            self._fingerprint = model_fingerprint(
                self._path,
                str(self._dtype).removeprefix("torch."),
                layers,
                digests,
                self._config.model.quantization,
                frequency_bytes(self._model),
                self._config.memory.kv_dtype,
            )
        return self._fingerprint

    def checked(self, weights: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> NewWeights:
        """Check a checkpoint's folder or file, or tensors by name; as the two methods below."""
        if isinstance(weights, str | Path):
            return self.checked_checkpoint(str(weights))
        return self.checked_tensors(weights.items() if isinstance(weights, Mapping) else weights)

    # -- replacing -----------------------------------------------------------------------------------------------------

    def checked_checkpoint(self, path: str) -> NewWeights:
        """Check that a checkpoint's weights can take the place of the present ones.

        Raises:
            ModelError: it does not fit this model; the message says where.
        """
        place = resolve_checkpoint(path)
        check_same_model(self._model_config, self._config_path, load_model_config(place), place)
        new = NewWeights(place, None)
        self._check(new)
        return new

    def checked_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> NewWeights:
        """Check that tensors can take the place of those of the same names; the others stay.

        Args:
            tensors: (name in the checkpoint, tensor of the checkpoint's shape), on any device.

        Raises:
            ModelError: one does not fit this model.
            UnsupportedFeatureError: they are not all of the model's, and its weights are quantized.
            RequestError: there is none, or one comes twice.
        """
        by_name: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name in by_name:
                raise RequestError(f"the weight {name!r} is given twice")
            by_name[name] = tensor
        if not by_name:
            raise RequestError("no weights are given; give at least one (name, tensor)")
        new = NewWeights(None, by_name)
        self._check(new)
        return new

    def replace(self, new: NewWeights) -> None:
        """Copy checked weights into the model's own tensors.

        Effects: graphs stay valid, or are captured anew where quantization or packing makes other tensors.

        Raises:
            EngineError: it failed halfway; the message says what the weights are now.
        """
        try:
            self._copy(new)
        except Exception as error:  # a file that was truncated meanwhile, or no memory
            self._put_back(error)
            raise EngineError(
                f"replacing the weights failed halfway, and those of {self._path} have been loaded again: {error}"
            ) from error
        if new.path is not None:
            self._path, self._fingerprint = new.path, None
        else:
            self._fingerprint = secrets.token_bytes(32)

    def read(self, name: str) -> Tensor:
        """Return a copy on the CPU of what a checkpoint's tensor was loaded to.

        Raises:
            RequestError: there is none of this name.
            UnsupportedFeatureError: the weights are quantized, or the model does not give them back.
        """
        if self._quantized is not None:
            raise UnsupportedFeatureError(
                f"the weights are quantized by {self._quantized.name!r}: there is no {name!r} as a checkpoint holds it"
            )
        try:
            return self._model.read_weight(name).cpu()
        finally:
            self._prepare()  # what was unpacked to be read
            self._forget_packed()

    def _check(self, new: NewWeights) -> None:
        twin = self._make_twin()
        if new.tensors is None:
            twin.load_weights(new.items())
        elif self._quantized is None:
            twin.update_weights(new.items())
        else:
            try:
                twin.load_weights(new.items())
            except GraftlmError as error:
                raise UnsupportedFeatureError(
                    f"the weights are quantized by {self._quantized.name!r}, so all have to come at once: {error}"
                ) from error

    def _copy(self, new: NewWeights) -> None:
        try:
            if new.tensors is None or self._quantized is not None:
                self._model.load_weights(new.items())
            else:
                self._model.update_weights(new.items())
            self._prepare()
        finally:
            self._forget_packed()
        if self._graphs is not None and self._quantized is not None:
            self._graphs.recapture()

    def _forget_packed(self) -> None:
        """Have nothing repeat calls with addresses of packed weights, which are elsewhere once they were unpacked."""
        if self._graphs is not None and self._graphs.uses_packed_weights:
            self._graphs.recapture()

    def _put_back(self, error: Exception) -> None:
        """Load the checkpoint before again, after copying another failed halfway."""
        logger.error("replacing the weights failed halfway; the former checkpoint is loaded again", exc_info=error)
        self._fingerprint = None
        try:
            self._copy(NewWeights(self._path, None))
        except Exception as second:
            self._fingerprint = secrets.token_bytes(32)
            raise EngineError(
                f"replacing the weights failed halfway ({error}), and so did loading {self._path} again ({second}): "
                "the weights are a mixture. Update them again before anything else."
            ) from error

    def _prepare(self) -> None:
        if self._quantized is not None:
            self._quantized.convert()
        if self._config.model.prepack:
            self._model.pack_weights()
