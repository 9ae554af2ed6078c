"""The released memory of a model's weights, and a copy of the weights where no checkpoint has them."""

import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Final

import numpy as np
import torch
from torch import Tensor, nn

from graftlm.contracts import Model
from graftlm.errors import UnsupportedFeatureError
from graftlm.execution.released_tensors import ReleasedTensors
from graftlm.layers import GroupedLinear, Linear, TokenEmbedding

__all__ = ["ReleasedWeights", "WeightCopy", "parameter_module"]

_ALIGNMENT_BYTES: Final = 64


def parameter_module(model: Model) -> nn.Module:
    """Return a model as a module, whose parameters are its weights.

    Raises:
        UnsupportedFeatureError: the model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} is not a torch.nn.Module, so the memory of its weights cannot be released"
        )
    return model


class ReleasedWeights:
    """A model whose parameters have no memory until `restore`. Buffers, which no checkpoint contains, are kept.

    Args:
        module: the model, which is released now, layer by layer. Packed and quantized weights are freed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts: list[ReleasedTensors] = []
        for part in module.modules():
            if isinstance(part, Linear | GroupedLinear | TokenEmbedding):
                part.discard()
            self._parts.append(ReleasedTensors(part.parameters(recurse=False)))

    def restore(self) -> None:
        """Allocate the parameters again, uninitialized. After an error, `restore` may be called again.

        Raises:
            RuntimeError: the device has too little free memory.
        """
        for part in self._parts:
            part.restore()


class WeightCopy:
    """A copy of weights in the form of a checkpoint: in host memory for a GPU, in a temporary file for a CPU.

    The file is in Python's folder for temporary files (`TMPDIR`), has no name, and is deleted by `close`.

    Args:
        weights: (name, tensor). The tensors may be created one by one.
        device: device of the model.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        self._held: list[tuple[str, Tensor]] = []
        self._places: list[tuple[str, torch.dtype, torch.Size, int]] = []
        self._file: IO[bytes] | None = None
        if device.type != "cpu":
            self._held = [(name, tensor.cpu()) for name, tensor in weights]
            return
        self._file = tempfile.TemporaryFile(prefix="graftlm-weights-")  # noqa: SIM115  # `close` closes it
        try:
            self._write(self._file, weights)
        except BaseException:
            self.close()
            raise

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). Tensors from a file are mapped, and must not be changed."""
        yield from self._held
        for name, dtype, shape, offset in self._places:
            num_bytes = shape.numel() * dtype.itemsize
            if not num_bytes:
                yield name, torch.empty(shape, dtype=dtype)
                continue
            assert self._file is not None, "tensors are read before `close`"
            mapped = np.memmap(self._file, dtype=np.uint8, mode="c", offset=offset, shape=(num_bytes,))
            yield name, torch.from_numpy(mapped).view(dtype).view(shape)

    def close(self) -> None:
        """Free the memory, or delete the file. Tensors that exist stay valid."""
        self._held = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, file: IO[bytes], weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            plain = tensor.detach().contiguous()
            offset = -(-file.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            file.seek(offset)
            self._places.append((name, plain.dtype, plain.shape, offset))
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
