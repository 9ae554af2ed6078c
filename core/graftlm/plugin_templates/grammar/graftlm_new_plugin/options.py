"""The options of the backend, as set in a configuration."""

from graftlm.contracts import MAX_CHOICES, GrammarOptions
from pydantic import Field

__all__ = ["ChoiceOptions"]


class ChoiceOptions(GrammarOptions):
    """The entries of `grammar.options`. `fallback` names the backends for specifications that this one refuses."""

    max_texts: int = Field(default=1000, ge=1, le=MAX_CHOICES, description="Maximum number of texts in a choice.")
