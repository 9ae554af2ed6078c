"""Creates the attention backend for the KV tensors."""

from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.target import Target
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionBackend, AttentionContext
from graftlm.execution.kv_store import KVStore
from graftlm.execution.split_attention import SplitAttention
from graftlm.memory import WindowPages
from graftlm.registry import Registry

__all__ = ["make_attention"]


def make_attention(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    kv: KVStore,
    window: WindowPages | None = None,
) -> AttentionBackend:
    """Create the attention backend.

    Args:
        window: the window pages if sliding-window layers have a separate memory, for which a second backend is created;
            else None.
    """
    layers = chosen.attention_layers
    context = AttentionContext(
        layers=layers,
        kv=kv,
        page_size=config.cache.page_size,
        device=target.device,
        dtype=target.dtype,
        max_requests=config.scheduling.max_running_requests,
        max_context_len=target.context_len,
    )

    def create() -> AttentionBackend:
        backend: AttentionBackend = registry.create(
            "attention", chosen.attention_provider, config.attention.options, context, config.origins
        )
        return backend

    if window is None:
        return create()
    has_full = any(layer.sliding_window is None for layer in layers)
    return SplitAttention(create() if has_full else None, create())
