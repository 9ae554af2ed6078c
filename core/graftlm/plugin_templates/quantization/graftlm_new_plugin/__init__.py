"""A graftlm plugin: the quantization `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import Quantization, QuantizationCapabilities, QuantizationContext

from graftlm_new_plugin.options import RowInt8Options

__all__ = ["provide_quantizations"]


def _create(options: RowInt8Options, context: QuantizationContext) -> Quantization:
    from graftlm_new_plugin.row_int8 import RowInt8  # imports torch

    return RowInt8(options)


@hookimpl
def provide_quantizations() -> list[Provider[Quantization]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Weights in 8 bits with one scale for each row; products use PyTorch's operations",
            api_version=1,
            create=_create,
            options=RowInt8Options,
            capabilities=QuantizationCapabilities(devices=("cpu", "cuda")),
        )
    ]
