"""The description of the served model for clients."""

from dataclasses import dataclass, field

from graftlm.assembly.resolved_plugins import ResolvedPlugins
from graftlm.pooling.sentence_embedding import EmbeddingDefaults

__all__ = ["ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The description of the served model for clients.

    The main process creates it when the replicas are ready; the endpoints read it.

    Attributes:
        name: name of the model in the API.
        path: path of the checkpoint, as configured.
        architectures: class names from config.json.
        dtype: dtype in which the model computes.
        kv_dtype: dtype of the KV cache.
        vocab_size: number of tokens in the vocabulary.
        context_len: maximum number of tokens of prompt and output together.
        memory_tokens: capacity of a replica's KV memory, in tokens.
        eos_token_ids: tokens that end the output.
        has_chat_template: whether the checkpoint has a chat template.
        created_s: Unix time at which the server started, in seconds.
        generates: whether the model generates text.
        labels: the labels of the score head's scores; empty if the model has no score head.
        embedding: the checkpoint's settings for embeddings.
        resolved: family -> the chosen provider and the reason.
        aliases: further names of the model in the API.
        image_token: the marker of a picture in a prompt; None if the model cannot use pictures.
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
    image_token: str | None = None

    def has_name(self, name: str | None) -> bool:
        """Return whether this name in a request means the model. This is also true for a missing name (None or "")."""
        return name in (None, "", "default", self.name, self.path, *self.aliases)

    def id_with(self, adapter: str | None) -> str:
        """Return the model's id in the API, with the name of an adapter unless `adapter` is None."""
        return self.name if adapter is None else f"{self.name}:{adapter}"
