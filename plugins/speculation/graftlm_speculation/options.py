"""Options of the drafters."""

from pydantic import Field, model_validator

from graftlm.contracts import DraftHeadOptions, DraftModelOptions, Options

__all__ = ["DraftModelDrafterOptions", "Eagle3Options", "MtpOptions", "SuffixOptions"]


class SuffixOptions(Options):
    """Options of `suffix`."""

    min_match_tokens: int = Field(
        default=2,
        ge=1,
        description="Minimum number of latest tokens that must occur earlier in the request, so that a draft is made.",
    )
    max_match_tokens: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Maximum number of latest tokens that are compared. Longer matches do not increase the confidence "
        "of a draft.",
    )
    search_cache: bool = Field(
        default=True,
        description="Also search the texts of the request's namespace in the prefix cache. Their index takes 15 to 60 "
        "bytes of host memory for each cached token.",
    )
    min_cached_match_tokens: int = Field(
        default=4,
        ge=1,
        description="Minimum number of latest tokens that must occur in a cached text, so that a draft is made. No "
        "more than `max_match_tokens` are compared.",
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


class Eagle3Options(DraftHeadOptions):
    """Options of `eagle3`."""

    path: str = Field(
        description="Checkpoint of the EAGLE-3 head, in the same forms as `model.path`. It must have been made for the "
        "served model. `demo-eagle3` is the head of the model `demo`.",
    )
    hidden_layers: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        description="Layers of the served model whose inputs the head reads; null: those in the head's config.json, or "
        "else 2, L // 2 and L - 3 of L layers.",
    )


class MtpOptions(DraftHeadOptions):
    """Options of `mtp`."""

    max_drafts: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Maximum length of a draft in tokens. Each token takes one step of the MTP layer, which was "
        "trained for the first token.",
    )
