"""Options of the grammar backends."""

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["XGrammarOptions"]


class XGrammarOptions(Options):
    """Options of `xgrammar`."""

    max_whitespace: int = Field(
        default=16,
        ge=1,
        le=128,
        description="Blanks and line ends in a row, at most, between the parts of JSON made by a schema.",
    )
