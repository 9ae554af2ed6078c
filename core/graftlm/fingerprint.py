"""What tells the keys and values of one model from those of another."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from graftlm.contracts import AttentionLayer

__all__ = ["model_fingerprint"]

_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024


def model_fingerprint(path: Path, dtype: str, layers: Sequence[AttentionLayer]) -> bytes:
    """Return a hash of everything that the keys and values of given tokens depend on.

    It covers config.json, the weights, the dtype and the layers. Of each weights file it reads the length and samples
    spread evenly over it, the first of which holds the header with the names, shapes and places of all tensors; so it
    costs milliseconds, and weights that were trained further, quantised or merged differ in it. It does not depend on
    where the checkpoint lies, on modification times, or on page sizes.

    Args:
        path: the checkpoint's folder.
        dtype: the name of the dtype of keys and values.

    Returns: 32 bytes.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"graftlm-model")
    digest.update((path / "config.json").read_bytes())
    digest.update(
        f"{dtype} {[(layer.num_kv_heads, layer.head_dim, layer.sliding_window) for layer in layers]}".encode()
    )
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.digest()


def _samples(file: Path) -> list[bytes]:
    """Return a file's content when it is short, else pieces spread evenly from its beginning to its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            return [stream.read()]
        samples = []
        for i in range(_SAMPLES):
            stream.seek(i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            samples.append(stream.read(_SAMPLE_BYTES))
        return samples
