"""What a configuration may give to the backend."""

from graftlm.contracts import MAX_CHOICES, GrammarOptions
from pydantic import Field

__all__ = ["ChoiceOptions"]


class ChoiceOptions(GrammarOptions):
    """What stands under `grammar.options`; `fallback` names backends for what this one refuses."""

    max_texts: int = Field(default=1000, ge=1, le=MAX_CHOICES, description="Texts of a choice at most.")
