"""What tells the keys and values of one model from those of another."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from graftlm.assembly.weight_digests import WeightDigests
from graftlm.checkpoint import checkpoint_files, is_gguf
from graftlm.config import QuantizationSettings
from graftlm.contracts import AttentionLayer

__all__ = ["model_fingerprint"]


def model_fingerprint(
    path: Path,
    dtype: str,
    layers: Sequence[AttentionLayer],
    digests: WeightDigests,
    quantization: QuantizationSettings | None = None,
    frequencies: bytes = b"",
    kv_dtype: str = "auto",
) -> bytes:
    """Return a hash of everything that the keys and values of given tokens depend on.

    It covers config.json, every byte of the weights, their quantization, the dtypes, the layers and how keys are
    rotated. It does not depend on where the checkpoint lies, on modification times, or on page sizes.

    Args:
        path: the checkpoint's folder, or GGUF file.
        dtype: the name of the dtype that the model computes in.
        digests: hashes the weight files, or remembers what they hash to.
        quantization: what the weights go through once they are loaded.
        frequencies: of the model's rotations, from `graftlm.layers.frequency_bytes`.
        kv_dtype: what keys and values are held in, as `memory.kv_dtype` names it.

    Returns: 32 bytes.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"graftlm-model")
    if not is_gguf(path):
        for file in (path / "config.json", *sorted(path.glob("quant*_config.json"))):
            digest.update(file.read_bytes())
    digest.update(f"{dtype} {[_stored(layer) for layer in layers]}".encode())
    if quantization is not None and quantization.name is not None:
        digest.update(f"{quantization.name} {sorted(quantization.options.items())}".encode())
    digest.update(frequencies)
    if kv_dtype != "auto":
        digest.update(f"held in {kv_dtype}".encode())
    files = checkpoint_files(path)
    for file, content in zip(files, digests.of(files), strict=True):
        digest.update(f"{file.name} {content.hex()}".encode())
    return digest.digest()


def _stored(layer: AttentionLayer) -> tuple[int | None, ...]:
    """Return what the numbers that a layer stores, and their order, depend on."""
    return layer.num_kv_heads, layer.head_dim, layer.sliding_window, layer.value_prefix_dim
