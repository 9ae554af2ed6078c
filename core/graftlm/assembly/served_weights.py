"""Loads, replaces and reads the weights of a served model, and computes their fingerprint."""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.assembly.fingerprint import model_fingerprint
from graftlm.assembly.quantization import QuantizedLayers
from graftlm.assembly.released_weights import ReleasedWeights, WeightCopy, parameter_module
from graftlm.assembly.weight_digests import WeightDigests, user_cache_dir
from graftlm.checkpoint import (
    check_same_model,
    iter_weights,
    load_model_config,
    resolve_checkpoint,
    text_weights,
    watch_reading,
)
from graftlm.config import EngineConfig
from graftlm.contracts import Model, ModelConfig
from graftlm.errors import EngineError, GraftlmError, RequestError, UnsupportedFeatureError
from graftlm.execution.graphs import HeldGraphs, ReplayedSteps
from graftlm.layers import frequency_bytes

__all__ = ["NewWeights", "ServedWeights"]

logger = logging.getLogger(__name__)


class NewWeights:
    """Weights that have been checked, and can replace a model's weights.

    Attributes:
        path: path of the checkpoint; None: the weights are tensors in memory.
        tensors: name in the checkpoint -> tensor, for some or all weights; None: all weights of the checkpoint.
    """

    def __init__(self, path: Path | None, tensors: Mapping[str, Tensor] | None) -> None:
        self.path = path
        self.tensors = tensors

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """Return an iterable of (name in the checkpoint, tensor). Each call reads the checkpoint again."""
        if self.path is not None:
            return iter_weights(self.path)
        return (self.tensors or {}).items()


class ServedWeights:
    """Loads, replaces and reads a model's weights. `load` and `replace` are called in the thread that runs the steps.

    All new weights are checked before the first one is copied. The check uses a copy of the model without memory, on
    PyTorch's meta device. If names, shapes or dtypes do not fit, the model is therefore not changed.

    Attributes:
        graphs: the graphs that use these weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        model_config: ModelConfig,
        make_meta_model: Callable[[], Model],
        quantized: QuantizedLayers | None,
        path: Path,
        dtype: torch.dtype,
    ) -> None:
        """Store the model, whose weights are not loaded yet.

        Args:
            make_meta_model: function that creates the same model on the meta device.
            quantized: the layers that are quantized each time after weights are loaded; None: no quantization.
            path: path of the checkpoint for `load`.
            dtype: dtype in which the model computes.
        """
        self._config = config
        self._model = model
        self._model_config = model_config
        self._make_meta_model = make_meta_model
        self._quantized = quantized
        self._path = self._config_path = path
        self._dtype = dtype
        self.graphs = HeldGraphs()
        self._fingerprint: bytes | None = None
        self._is_checkpoint = True  # whether the weights are those of `_path`
        self._released: ReleasedWeights | None = None
        self._copy_of_released: WeightCopy | None = None
        #: Name -> tensor without memory for each weight that was loaded since the weights were dropped; None: no weight
        #: is missing.
        self._received: dict[str, Tensor] | None = None
        self._lacking: str | None = None

    def load(self, announce: Callable[[str], None] | None = None) -> None:
        """Load the checkpoint's weights, and quantize and pack them as configured.

        Args:
            announce: function that is called with the progress of a large checkpoint; None: a bar is shown on a
                terminal.

        Raises:
            GraftlmError: the checkpoint cannot be read, or does not fit the model.
        """
        with watch_reading(self._path, announce) as on_read:
            self._model.load_weights(self._text_weights(iter_weights(self._path, self._dtype, on_read=on_read)))
        self._prepare()

    def set_graphs(self, graphs: ReplayedSteps | None) -> None:
        """Store the graphs that use these weights; None: there are no graphs."""
        self.graphs = HeldGraphs(graphs)

    def fingerprint(self) -> bytes:
        """Return 32 bytes that identify the current weights in the names of stored KV blocks.

        For a checkpoint, the bytes are a hash of its content at the first call. For tensors from memory, they are
        random.

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

    def _text_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return a checkpoint's weights without those of a tower for pictures."""
        return weights if self._model_config.media is None else text_weights(weights)

    def checked(self, weights: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> NewWeights:
        """Check the weights of a checkpoint with `checked_checkpoint`, or tensors with `checked_tensors`."""
        if isinstance(weights, str | Path):
            return self.checked_checkpoint(str(weights))
        return self.checked_tensors(weights.items() if isinstance(weights, Mapping) else weights)

    # -- replacing -----------------------------------------------------------------------------------------------------

    def checked_checkpoint(self, path: str) -> NewWeights:
        """Check that a checkpoint's weights can replace the current weights.

        Raises:
            ModelError: the checkpoint does not fit this model; the message has the first difference.
        """
        self._check_replaceable()
        place = resolve_checkpoint(path)
        check_same_model(self._model_config, self._config_path, load_model_config(place), place)
        new = NewWeights(place, None)
        self._check(new)
        return new

    def checked_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> NewWeights:
        """Check that tensors can replace the weights with the same names. Other weights will not be changed.

        Args:
            tensors: (name in the checkpoint, tensor with the checkpoint's shape), on any device.

        Raises:
            ModelError: a tensor does not fit this model.
            UnsupportedFeatureError: some weights are missing, but quantized models need all of them.
            RequestError: there are no tensors, or a name occurs twice.
        """
        self._check_replaceable()
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
        """Copy checked weights into the model's tensors.

        Effects: if quantization or packing creates new tensors, graphs are captured again; otherwise they stay valid.

        Raises:
            RequestError: the memory of the weights is released.
            EngineError: copying failed halfway; the message says which weights the model has now.
        """
        self._check_resident()
        try:
            self._copy(new)
        except Exception as error:  # for instance, a file was truncated after the check, or memory is full
            self._restore(error)
            raise EngineError(
                f"replacing the weights failed halfway, and the weights of {self._path} were loaded again: {error}"
            ) from error
        self._is_checkpoint = new.path is not None
        if new.path is not None:
            self._path, self._fingerprint = new.path, None
        else:
            self._fingerprint = secrets.token_bytes(32)
        self._note_received(new)

    def read(self, name: str) -> Tensor:
        """Return a copy of a weight on the CPU, in the checkpoint's shape.

        Args:
            name: the weight's name in the checkpoint.

        Raises:
            RequestError: there is no weight with this name.
            RequestError: the memory of the weights is released, or weights are missing.
            UnsupportedFeatureError: the weights are quantized, or the model does not support reading them.
        """
        self._check_resident()
        if self._lacking is not None:
            raise RequestError(self._lacking)
        if self._quantized is not None:
            raise UnsupportedFeatureError(
                f"the weights are quantized by {self._quantized.name!r}: {name!r} does not exist in the checkpoint's "
                "format"
            )
        try:
            return self._model.read_weight(name).cpu()
        finally:
            self._prepare()  # packs weights again that were unpacked for reading
            self._recapture_packed()

    # -- releasing -----------------------------------------------------------------------------------------------------

    @property
    def is_released(self) -> bool:
        """Whether the weights have no memory: `release` was called, and `resume` was not."""
        return self._released is not None

    @property
    def lacking(self) -> str | None:
        """The reason why no step can run: weights were dropped and not all were loaded since; None: none is missing."""
        return self._lacking

    def drop(self) -> None:
        """Consider all weights missing until new ones were loaded."""
        self._received = {}
        if self._copy_of_released is not None:
            self._copy_of_released.close()
            self._copy_of_released = None
        self._fingerprint = secrets.token_bytes(32)
        self._lacking = "the weights were dropped; load new ones for the whole model"

    def check_release(self) -> None:
        """Check that the weights can be released and restored.

        Raises:
            UnsupportedFeatureError: they cannot.
        """
        parameter_module(self._model)
        if self._quantized is not None and not self._is_checkpoint:
            raise UnsupportedFeatureError(
                f"the weights were sent as tensors and are quantized by {self._quantized.name!r}, so they cannot be "
                "restored after a release; drop them (sleep level 2) and load new ones"
            )

    def release(self, *, keep: bool) -> None:
        """Release the memory of the weights until `resume`. Called in the thread that runs the steps.

        Weights of a checkpoint are read from it again by `resume`. Weights that were sent as tensors are copied first.

        Args:
            keep: whether `resume` restores the weights; False: they are dropped.

        Effects: graphs are not captured until `resume`.

        Raises:
            GraftlmError: the weights cannot be copied, and keep their memory.
            OSError: the copy cannot be written; the weights keep their memory.
        """
        module = parameter_module(self._model)
        if keep and self._released is None and not self._is_checkpoint and self._lacking is None:
            self.check_release()
            try:
                self._copy_of_released = WeightCopy(self._readable(), next(module.parameters()).device)
            except BaseException:
                self._prepare()  # packs weights again that were unpacked for reading
                self._recapture_packed()
                raise
        if self._released is None:
            self.graphs.hold()
            self._released = ReleasedWeights(module)
        if not keep or self._lacking is not None:
            self.drop()

    def resume(self) -> None:
        """Allocate the memory of the weights, and restore them unless they were dropped. No effect if not released.

        If restoring fails, the weights count as dropped, and `lacking` has the error.

        Raises:
            RuntimeError: the device has too little free memory; the weights stay released.
        """
        if self._released is None:
            return
        self._released.restore()
        self._released = None
        try:
            if self._lacking is None:
                self._reload()
        finally:
            self.graphs.recapture()
            self.graphs.unhold()

    def _reload(self) -> None:
        copied, self._copy_of_released = self._copy_of_released, None
        try:
            self._model.load_weights(
                self._text_weights(iter_weights(self._path, self._dtype)) if copied is None else copied.items()
            )
            self._prepare()
        except Exception as error:
            logger.exception("the released weights cannot be loaded again")
            self.drop()
            self._lacking = (
                f"the released weights cannot be loaded again ({error}); load other ones for the whole model"
            )
        finally:
            if copied is not None:
                copied.close()

    def _readable(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the checkpoint with the value that the model has now."""
        for name, _ in self._text_weights(iter_weights(self._path)):
            try:
                yield name, self._model.read_weight(name)
            except UnsupportedFeatureError:
                raise
            except RequestError:  # a checkpoint may have tensors that the model ignores
                continue

    def _note_received(self, new: NewWeights) -> None:
        """Record new weights after a drop, and check whether weights are still missing."""
        if self._received is None:
            return
        if new.tensors is not None:
            self._received |= {
                name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in new.tensors.items()
            }
            try:
                self._make_meta_model().load_weights(self._received.items())
            except GraftlmError as error:
                self._lacking = f"the weights were dropped, and only a part was loaded since: {error}"
                return
        self._received = self._lacking = None

    def _check_replaceable(self) -> None:
        if self._model_config.media is not None:
            raise UnsupportedFeatureError(
                "the weights of a model with a tower for pictures cannot be replaced; start an engine with the new "
                "checkpoint"
            )

    def _check_resident(self) -> None:
        if self._released is not None:
            raise RequestError("the memory of the weights is released; resume it first (tag weights)")

    def _check(self, new: NewWeights) -> None:
        meta_model = self._make_meta_model()
        if new.tensors is None:
            meta_model.load_weights(new.items())
        elif self._quantized is None:
            meta_model.update_weights(new.items())
        else:
            try:
                meta_model.load_weights(new.items())
            except GraftlmError as error:
                raise UnsupportedFeatureError(
                    f"the weights are quantized by {self._quantized.name!r}, so all weights must be replaced "
                    f"together: {error}"
                ) from error

    def _copy(self, new: NewWeights) -> None:
        try:
            if new.tensors is None or self._quantized is not None:
                self._model.load_weights(new.items())
            else:
                self._model.update_weights(new.items())
            self._prepare()
        finally:
            self._recapture_packed()
        if self._quantized is not None:
            self.graphs.recapture()

    def _recapture_packed(self) -> None:
        """Discard recorded kernel calls if they contain addresses of packed weights, because packing changes these."""
        if self.graphs.uses_packed_weights:
            self.graphs.recapture()

    def _restore(self, error: Exception) -> None:
        """Load the previous checkpoint again, because copying new weights failed halfway."""
        if self._received is not None:
            self.drop()
            raise EngineError(f"replacing the weights failed halfway ({error}): {self._lacking}") from error
        logger.error("replacing the weights failed halfway; the former checkpoint is loaded again", exc_info=error)
        self._fingerprint, self._is_checkpoint = None, True
        try:
            self._copy(NewWeights(self._path, None))
        except Exception as second:
            self._fingerprint = secrets.token_bytes(32)
            raise EngineError(
                f"replacing the weights failed halfway ({error}), and loading {self._path} again failed, too "
                f"({second}): the model has a mixture of weights. Update them again before anything else."
            ) from error

    def _prepare(self) -> None:
        if self._quantized is not None:
            self._quantized.convert()
        if self._config.model.prepack:
            self._model.pack_weights()
