"""Grammar backends for graftlm: `xgrammar`, `llguidance`. Importing this package imports neither library, nor torch."""

from collections.abc import Iterable
from importlib.util import find_spec

from graftlm.contracts import GrammarBackend, GrammarContext, Platform, Provider
from graftlm.hookspecs import hookimpl
from graftlm_grammar.options import LLGuidanceOptions, XGrammarOptions

__all__ = ["LLGuidanceOptions", "XGrammarOptions", "provide_grammar_backends"]


def _xgrammar_unavailable(platform: Platform) -> str | None:
    return None if find_spec("xgrammar") else "the package xgrammar is missing; pip install xgrammar"


def _create_xgrammar(options: XGrammarOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(options, context)


def _llguidance_unavailable(platform: Platform) -> str | None:
    return None if find_spec("llguidance") else "the package llguidance is missing; pip install llguidance"


def _create_llguidance(options: LLGuidanceOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(options, context)


@hookimpl
def provide_grammar_backends() -> Iterable[Provider[GrammarBackend]]:
    """Offer `xgrammar` and `llguidance`."""
    return [
        Provider(
            name="xgrammar",
            summary="JSON schemas, regular expressions and EBNF, by the xgrammar library",
            api_version=1,
            create=_create_xgrammar,
            options=XGrammarOptions,
            unavailable=_xgrammar_unavailable,
            rank=10,
        ),
        Provider(
            name="llguidance",
            summary="the same, and JSON schemas whose keywords meet, such as allOf, by the llguidance library",
            api_version=1,
            create=_create_llguidance,
            options=LLGuidanceOptions,
            unavailable=_llguidance_unavailable,
            rank=5,
        ),
    ]
