"""Computes a model's fingerprint, which differs between models that compute different keys and values."""

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
    """Return a hash of everything that determines a model's keys and values for given tokens.

    The hash covers config.json, every byte of the weights, their quantization, the dtypes, the layers and the rotation
    of keys. It does not depend on the checkpoint's location, on modification times or on page sizes.

    Args:
        path: the checkpoint's folder, or GGUF file.
        dtype: name of the dtype in which the model computes.
        layers: the model's attention layers.
        digests: hashes the weight files, or returns stored hashes.
        quantization: the quantization that is applied after loading; None: no quantization.
        frequencies: frequencies of the model's rotary embedding, from `graftlm.layers.frequency_bytes`.
        kv_dtype: dtype of the KV cache, in the form of `memory.kv_dtype`.

    Returns: 32 bytes.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"graftlm-model")
    if not is_gguf(path):
        for file in (path / "config.json", *sorted(path.glob("quant*_config.json"))):
            digest.update(file.read_bytes())
    digest.update(f"{dtype} {[_layer_key(layer) for layer in layers]}".encode())
    if quantization is not None and quantization.name is not None:
        digest.update(f"{quantization.name} {sorted(quantization.options.items())}".encode())
    digest.update(frequencies)
    if kv_dtype != "auto":
        digest.update(f"held in {kv_dtype}".encode())
    files = checkpoint_files(path)
    for file, content in zip(files, digests.of(files), strict=True):
        digest.update(f"{file.name} {content.hex()}".encode())
    return digest.digest()


def _layer_key(layer: AttentionLayer) -> tuple[int | None, ...]:
    """Return the properties of a layer that determine its keys and values."""
    return layer.num_kv_heads, layer.head_dim, layer.sliding_window, layer.value_prefix_dim
