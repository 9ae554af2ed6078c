"""Attention backends for graftlm: `torch_native`, `triton`, `flashinfer`. Importing this package imports no torch."""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from graftlm.contracts import AttentionBackend, AttentionCapabilities, AttentionContext, Platform, Provider
from graftlm.hookspecs import hookimpl
from graftlm_attention.options import FlashInferOptions, TorchNativeOptions, TritonOptions

__all__ = ["FlashInferOptions", "TorchNativeOptions", "TritonOptions", "provide_attention_backends"]

_TRITON_CAPABILITY = (8, 0)
_TRITON_HEAD_DIMS = tuple(range(8, 257, 8))
_FLASHINFER_CAPABILITY = (8, 0)
_FLASHINFER_VERSION = (0, 7)


def _create_torch_native(options: TorchNativeOptions, context: AttentionContext) -> AttentionBackend:
    from graftlm_attention.torch_native import create_torch_native

    return create_torch_native(options, context)


def _create_triton(options: TritonOptions, context: AttentionContext) -> AttentionBackend:
    from graftlm_attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(options, context)


def _create_flashinfer(options: FlashInferOptions, context: AttentionContext) -> AttentionBackend:
    from graftlm_attention.flashinfer_library import load_flashinfer
    from graftlm_attention.flashinfer_paged import FlashInferAttention

    return FlashInferAttention(options, context, load_flashinfer())


def _flashinfer_obstacle(platform: Platform) -> str | None:
    if platform.device != "cuda":
        return f"its kernels run on a CUDA device; this device is {platform.device!r}"
    capability = platform.compute_capability
    if capability is not None and capability < _FLASHINFER_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere) or later, this device has {capability[0]}.{capability[1]}"
    return _package_obstacle()


def _package_obstacle() -> str | None:
    """Return why FlashInfer cannot be imported, or None if it can. Does not import FlashInfer."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return "the package flashinfer-python is not installed: pip install graftlm[flashinfer]"
    if tuple(int(part) for part in found.split(".")[:2]) < _FLASHINFER_VERSION:
        return f"it needs flashinfer-python 0.7 or later, but {found} is installed: pip install graftlm[flashinfer]"
    return _triton_obstacle(Platform("cuda"))


def _interprets_triton(environment: Mapping[str, str]) -> bool:
    """Return whether Triton will interpret its kernels in Python. Triton reads `TRITON_INTERPRET` at its import."""
    return environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _triton_obstacle(platform: Platform) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed: pip install graftlm[cuda]"
    if platform.device != "cuda":
        return (
            f"its kernels run on a CUDA device; this device is {platform.device!r}. For tests, set the environment "
            "variable TRITON_INTERPRET=1; then the kernels are interpreted on a CPU"
        )
    capability = platform.compute_capability
    if capability is not None and capability < _TRITON_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere) or later, this device has {capability[0]}.{capability[1]}"
    return None


def _interpreted_obstacle(platform: Platform) -> str | None:
    if find_spec("triton") is None:
        return _triton_obstacle(platform)
    return None if platform.device == "cpu" else "TRITON_INTERPRET is set: kernels are interpreted on the CPU only"


def _triton(interpreted: bool) -> Provider[AttentionBackend]:
    """Return the provider of `triton`.

    Args:
        interpreted: whether kernels are interpreted, for tests. If so, only float32 is supported, because the
            interpreter computes other dtypes incorrectly, and `auto` never chooses the provider.
    """
    return Provider(
        name="triton",
        summary="Paged attention in Triton: chunks over paged prefixes, split contexts for decoding, CUDA graphs",
        api_version=1,
        create=_create_triton,
        options=TritonOptions,
        unavailable=_interpreted_obstacle if interpreted else _triton_obstacle,
        capabilities=AttentionCapabilities(
            devices=("cpu",) if interpreted else ("cuda",),
            dtypes=("float32",) if interpreted else ("float32", "bfloat16", "float16"),
            head_dims=_TRITON_HEAD_DIMS,
            kv_dtypes=("int8", "fp8"),
            sinks=True,
            graph=not interpreted,
        ),
        rank=-10 if interpreted else 10,
    )


@hookimpl
def provide_attention_backends() -> Iterable[Provider[AttentionBackend]]:
    """Return the providers of `torch_native`, `triton` and `flashinfer`."""
    return [
        Provider(
            name="torch_native",
            summary="Runs everywhere: a compiled CPU kernel over the pages, or PyTorch's own attention",
            api_version=1,
            create=_create_torch_native,
            options=TorchNativeOptions,
            capabilities=AttentionCapabilities(
                dtypes=("float32", "bfloat16", "float16"), kv_dtypes=("int8",), value_prefix=True, sinks=True
            ),
        ),
        _triton(interpreted=_interprets_triton(os.environ)),
        Provider(
            name="flashinfer",
            summary="FlashInfer's paged attention: planned once per step, shared prefixes read once, CUDA graphs",
            api_version=1,
            create=_create_flashinfer,
            options=FlashInferOptions,
            unavailable=_flashinfer_obstacle,
            capabilities=AttentionCapabilities(
                devices=("cuda",),
                dtypes=("bfloat16", "float16"),
                head_dims=(64, 128, 256),
                page_sizes=(1, 16),
                cascade=True,
                graph=True,
            ),
            rank=-5,  # `auto` never chooses it: its speed has not been compared with that of the other backends
        ),
    ]
