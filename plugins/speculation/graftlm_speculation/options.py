"""Options of the drafters."""

from pydantic import Field, model_validator

from graftlm.contracts import Options

__all__ = ["DraftModelOptions", "SuffixOptions"]


class SuffixOptions(Options):
    """Options of `suffix`."""

    min_match_tokens: int = Field(
        default=2, ge=1, description="Shortest sequence of latest tokens whose earlier occurrence is used."
    )
    max_match_tokens: int = Field(
        default=16, ge=1, description="Longest sequence that is compared; longer ones are equally trusted."
    )

    @model_validator(mode="after")
    def _check_order(self) -> "SuffixOptions":
        if self.min_match_tokens > self.max_match_tokens:
            raise ValueError(
                f"min_match_tokens is {self.min_match_tokens}, above max_match_tokens, {self.max_match_tokens}"
            )
        return self


class DraftModelOptions(Options):
    """Options of `draft_model`."""

    path: str = Field(description="Checkpoint of the draft model, as `model.path`; of the served model's vocabulary.")
    max_drafts: int = Field(
        default=5, ge=1, le=64, description="Maximum length of a draft in tokens; each is a step of the draft model."
    )
    kv_tokens: int = Field(
        default=16384, ge=1, description="Size of the draft model's KV memory in tokens; it is allocated at the start."
    )
    prefill_tokens: int = Field(
        default=2048, ge=1, description="Maximum number of known tokens that the draft model computes in one call."
    )
