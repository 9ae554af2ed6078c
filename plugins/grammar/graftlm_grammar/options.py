"""Options of the grammar backends."""

from typing import Literal

from pydantic import Field

from graftlm.contracts import GrammarOptions

__all__ = ["JsonOptions", "LLGuidanceOptions", "OutlinesOptions", "XGrammarOptions"]


class JsonOptions(GrammarOptions):
    """How JSON that a schema asks for is written."""

    whitespace: Literal["flexible", "spaced", "compact"] = Field(
        default="flexible",
        description="Between the parts of JSON: `flexible` leaves it to the model, `spaced` is one blank after each "
        "colon and comma, `compact` is none. The latter two leave more for jump-forward.",
    )
    max_whitespace: int = Field(
        default=16,
        ge=1,
        le=128,
        description="Where it is flexible: blanks and line ends in a row, at most.",
    )


class XGrammarOptions(JsonOptions):
    """Options of `xgrammar`."""


class LLGuidanceOptions(JsonOptions):
    """Options of `llguidance`."""


class OutlinesOptions(JsonOptions):
    """Options of `outlines`."""

    max_compile_s: float = Field(
        default=10.0, gt=0.0, le=600.0, description="Seconds that a grammar may take to compile; refused beyond."
    )
    max_index_mib: int = Field(
        default=512, ge=1, le=65536, description="MiB that a compiled grammar may take; refused beyond."
    )
