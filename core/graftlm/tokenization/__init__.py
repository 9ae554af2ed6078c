"""Converts text to token ids and back: tokenizer, incremental detokenization, stop strings, completions' text."""

from graftlm.tokenization.detokenizer import Detokenizer, TokenDecoder
from graftlm.tokenization.stop_strings import StopMatch, StopStrings
from graftlm.tokenization.text_stream import StopStringWatch, TextStream, TextUpdate
from graftlm.tokenization.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "StopMatch",
    "StopStringWatch",
    "StopStrings",
    "TextStream",
    "TextUpdate",
    "TokenDecoder",
    "Tokenizer",
]
