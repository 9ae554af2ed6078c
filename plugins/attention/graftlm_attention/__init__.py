"""Attention backends for graftlm: `torch_native`. Importing this package imports no torch."""

from collections.abc import Iterable

from graftlm.contracts import AttentionBackend, AttentionCapabilities, AttentionContext, Provider
from graftlm.hookspecs import hookimpl
from graftlm_attention.options import TorchNativeOptions

__all__ = ["TorchNativeOptions", "provide_attention_backends"]


def _create_torch_native(options: TorchNativeOptions, context: AttentionContext) -> AttentionBackend:
    from graftlm_attention.torch_native import create_torch_native

    return create_torch_native(options, context)


@hookimpl
def provide_attention_backends() -> Iterable[Provider[AttentionBackend]]:
    """Offer `torch_native`."""
    return [
        Provider(
            name="torch_native",
            summary="Runs everywhere: a compiled CPU kernel over the pages, or PyTorch's own attention",
            api_version=1,
            create=_create_torch_native,
            options=TorchNativeOptions,
            capabilities=AttentionCapabilities(dtypes=("float32", "bfloat16", "float16")),
        )
    ]
