"""Options of the grammar backends."""

from typing import Literal

from pydantic import Field

from graftlm.contracts import GrammarOptions

__all__ = ["JsonOptions", "LLGuidanceOptions", "OutlinesOptions", "XGrammarOptions"]


class JsonOptions(GrammarOptions):
    """White space in JSON output."""

    whitespace: Literal["flexible", "spaced", "compact"] = Field(
        default="flexible",
        description="White space in JSON output. `flexible`: the model chooses. `spaced`: one space after each "
        "colon and comma. `compact`: none. With `spaced` and `compact`, jump-forward can append more "
        "tokens.",
    )
    max_whitespace: int = Field(
        default=16,
        ge=1,
        le=128,
        description="For `whitespace: flexible`: maximum number of consecutive spaces, tabs and line ends.",
    )


class XGrammarOptions(JsonOptions):
    """Options of `xgrammar`."""


class LLGuidanceOptions(JsonOptions):
    """Options of `llguidance`."""


class OutlinesOptions(JsonOptions):
    """Options of `outlines`."""

    max_compile_s: float = Field(
        default=10.0, gt=0.0, le=600.0, description="Maximum compile time in seconds; longer compilations are refused."
    )
    max_index_mib: int = Field(
        default=512, ge=1, le=65536, description="Maximum size of a compiled grammar in MiB; larger ones are refused."
    )
