"""A graftlm plugin: the attention backend `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import AttentionBackend, AttentionCapabilities, AttentionContext

from graftlm_new_plugin.options import GatherOptions

__all__ = ["provide_attention_backends"]


def _create(options: GatherOptions, context: AttentionContext) -> AttentionBackend:
    from graftlm_new_plugin.attention import GatherAttention  # imports torch

    return GatherAttention(options, context)


@hookimpl
def provide_attention_backends() -> list[Provider[AttentionBackend]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Gathers the keys and values of each request, and computes attention in PyTorch",
            api_version=1,
            create=_create,
            options=GatherOptions,
            capabilities=AttentionCapabilities(devices=("cpu", "cuda")),
            rank=-10,  # low, so that `auto` prefers the built-in backends
        )
    ]
