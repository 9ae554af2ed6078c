"""Options of the drafters."""

from pydantic import Field, model_validator

from graftlm.contracts import Options

__all__ = ["SuffixOptions"]


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
