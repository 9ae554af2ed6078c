"""What clients may know of the model that is served."""

from dataclasses import dataclass, field

from graftlm.assembly.resolved_plugins import ResolvedPlugins
from graftlm.pooling.sentence_embedding import EmbeddingDefaults

__all__ = ["ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model.

    Attributes:
        name: in the API.
        path: of the checkpoint, as configured.
        aliases: further names in the API.
        dtype: what the model computes in.
        kv_dtype: what its KV memory holds.
        context_len: tokens of prompt and output together at most.
        memory_tokens: tokens that a replica's KV memory holds.
        created_s: Unix time at which the server started.
        generates: whether it generates text.
        labels: what the numbers of its score head stand for; empty: it has none.
        embedding: how the checkpoint's embeddings are made.
        resolved: which provider each family of plugins has, and why.
    """

    name: str
    path: str
    architectures: tuple[str, ...]
    dtype: str
    kv_dtype: str
    vocab_size: int
    context_len: int
    memory_tokens: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    created_s: int
    generates: bool = True
    labels: tuple[str, ...] = ()
    embedding: EmbeddingDefaults = field(default_factory=EmbeddingDefaults)
    resolved: ResolvedPlugins = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    def has_name(self, name: str | None) -> bool:
        """Return whether requests may name the model so; without a name they mean it, too."""
        return name in (None, "", "default", self.name, self.path, *self.aliases)

    def id_with(self, adapter: str | None) -> str:
        """Return the id in the API of the model with an adapter, or of the model alone."""
        return self.name if adapter is None else f"{self.name}:{adapter}"
