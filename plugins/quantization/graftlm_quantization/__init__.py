"""Weight-only quantizations for graftlm: `int8`, `int4`. Importing this package imports no torch."""

from collections.abc import Iterable

from graftlm.contracts import Provider, Quantization, QuantizationCapabilities, QuantizationContext
from graftlm.hookspecs import hookimpl
from graftlm_quantization.options import Int4Options, Int8Options

__all__ = ["Int4Options", "Int8Options", "provide_quantizations"]

_CAPABILITIES = QuantizationCapabilities(devices=("cpu",), dtypes=("float32", "bfloat16"))


def _create_int8(options: Int8Options, context: QuantizationContext) -> Quantization:
    from graftlm_quantization.weight_only import WeightOnly

    return WeightOnly(8, options.group_size, options)


def _create_int4(options: Int4Options, context: QuantizationContext) -> Quantization:
    from graftlm_quantization.weight_only import WeightOnly

    return WeightOnly(4, options.group_size, options)


@hookimpl
def provide_quantizations() -> Iterable[Provider[Quantization]]:
    """Offer `int8` and `int4`."""
    return [
        Provider(
            name="int8",
            summary="Weights in 8 bits, symmetric, activations as they are: half the memory, nearly the same answers",
            api_version=1,
            create=_create_int8,
            options=Int8Options,
            capabilities=_CAPABILITIES,
        ),
        Provider(
            name="int4",
            summary="Weights in 4 bits in groups with an offset, activations as they are: over three times smaller",
            api_version=1,
            create=_create_int4,
            options=Int4Options,
            capabilities=_CAPABILITIES,
        ),
    ]
