"""Quantizations for graftlm: `int8` and `int4` on a CPU, `fp8` on a GPU. Importing this package imports no torch."""

from collections.abc import Iterable

from graftlm.contracts import Platform, Provider, Quantization, QuantizationCapabilities, QuantizationContext
from graftlm.hookspecs import hookimpl
from graftlm_quantization.options import Fp8Options, Int4Options, Int8Options

__all__ = ["Fp8Options", "Int4Options", "Int8Options", "provide_quantizations"]

_CAPABILITIES = QuantizationCapabilities(devices=("cpu",), dtypes=("float32", "bfloat16"))
_FP8_COMPUTE_CAPABILITY = (8, 9)


def _create_int8(options: Int8Options, context: QuantizationContext) -> Quantization:
    from graftlm_quantization.weight_only import WeightOnly

    return WeightOnly(8, options.group_size, options)


def _create_int4(options: Int4Options, context: QuantizationContext) -> Quantization:
    from graftlm_quantization.weight_only import WeightOnly

    return WeightOnly(4, options.group_size, options)


def _create_fp8(options: Fp8Options, context: QuantizationContext) -> Quantization:
    from graftlm_quantization.fp8 import Fp8, multiply_by_gpu

    return Fp8(options, multiply_by_gpu)


def _fp8_obstacle(platform: Platform) -> str | None:
    if platform.device != "cuda":
        return f"its products run on a CUDA device; this device is {platform.device!r}; int8 and int4 run on a CPU"
    capability = platform.compute_capability
    if capability is not None and capability < _FP8_COMPUTE_CAPABILITY:
        return f"it needs compute capability 8.9 (Ada) or later, this device has {capability[0]}.{capability[1]}"
    return None


@hookimpl
def provide_quantizations() -> Iterable[Provider[Quantization]]:
    """Return the providers of `int8`, `int4` and `fp8`."""
    return [
        Provider(
            name="int8",
            summary="Weights in 8 bits, symmetric; activations unchanged: half the memory, nearly the same answers",
            api_version=1,
            create=_create_int8,
            options=Int8Options,
            capabilities=_CAPABILITIES,
        ),
        Provider(
            name="int4",
            summary="Weights in 4 bits, groups with an offset; activations unchanged: over three times smaller",
            api_version=1,
            create=_create_int4,
            options=Int4Options,
            capabilities=_CAPABILITIES,
        ),
        Provider(
            name="fp8",
            summary="Weights and activations in 8-bit floating point, on GPUs that support it: half the memory",
            api_version=1,
            create=_create_fp8,
            options=Fp8Options,
            unavailable=_fp8_obstacle,
            capabilities=QuantizationCapabilities(devices=("cuda",), dtypes=("bfloat16",)),
        ),
    ]
