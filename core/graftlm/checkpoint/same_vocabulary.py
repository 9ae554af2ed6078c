"""Checks whether two checkpoints have the same vocabulary."""

from pathlib import Path
from typing import Final

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

__all__ = ["check_same_vocabulary"]

_TOKENIZER: Final = "tokenizer.json"


def check_same_vocabulary(own: ModelConfig, own_path: Path, other: ModelConfig, path: Path) -> None:
    """Refuse a checkpoint whose token ids have another meaning than those of the served model.

    If both have a tokenizer.json, the ids of its tokens are compared. The vocabulary sizes in config.json may then
    differ, because embeddings are padded. Without the two files, only the vocabulary sizes are compared.

    Args:
        own, own_path: configuration and path of the served model.
        other, path: configuration and path of the checkpoint that is checked.

    Raises:
        CheckpointError: the vocabularies differ; the message has both sizes, and a token with different ids.
    """
    files = own_path / _TOKENIZER, path / _TOKENIZER
    can_compare = all(file.is_file() for file in files)
    difference = _difference(*files) if can_compare else None
    if difference is None and (can_compare or own.vocab_size == other.vocab_size):
        return
    reason = f". Their tokenizers differ: {difference}" if difference else ""
    raise CheckpointError(
        f"{path} has a vocabulary of {other.vocab_size:,} tokens, the served model {own_path} has "
        f"{own.vocab_size:,}{reason}. Choose a checkpoint with the same tokenizer as the served model's"
    )


def _difference(own: Path, other: Path) -> str | None:
    """Return how the tokens of two files tokenizer.json differ; None if they have the same ids."""
    if own.read_bytes() == other.read_bytes():
        return None
    import tokenizers

    try:
        own_ids, other_ids = (tokenizers.Tokenizer.from_file(str(file)).get_vocab() for file in (own, other))
    except Exception as error:  # the library raises `Exception` itself
        return f"{own} or {other} cannot be read: {error}"
    differing = [token for token in own_ids.keys() | other_ids.keys() if own_ids.get(token) != other_ids.get(token)]
    if not differing:
        return None
    token = min(differing, key=lambda token: (own_ids.get(token, other_ids.get(token, 0)), token))
    found, expected = other_ids.get(token, "missing"), own_ids.get(token, "missing")
    return f"{len(differing):,} tokens have other ids; the id of {token!r} is {found}, expected {expected}"
