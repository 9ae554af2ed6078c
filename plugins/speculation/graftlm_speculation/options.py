"""Options of the drafters."""

from pydantic import Field, model_validator

from graftlm.contracts import DraftModelOptions, Options

__all__ = ["DraftModelDrafterOptions", "SuffixOptions"]


class SuffixOptions(Options):
    """Options of `suffix`."""

    min_match_tokens: int = Field(
        default=2,
        ge=1,
        description="Minimum number of latest tokens that must have occurred before, so that a draft is made.",
    )
    max_match_tokens: int = Field(
        default=16,
        ge=1,
        description="Maximum number of latest tokens that are compared. Longer matches do not increase the confidence "
        "of a draft.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> "SuffixOptions":
        if self.min_match_tokens > self.max_match_tokens:
            raise ValueError(
                f"min_match_tokens is {self.min_match_tokens}, above max_match_tokens, {self.max_match_tokens}"
            )
        return self


class DraftModelDrafterOptions(DraftModelOptions):
    """Options of `draft_model`."""

    max_drafts: int = Field(
        default=5,
        ge=1,
        le=64,
        description="Maximum length of a draft in tokens. Each token takes one step of the draft model.",
    )
    prefill_tokens: int = Field(
        default=2048,
        ge=1,
        description="Maximum number of prompt and output tokens that the draft model computes in one call.",
    )
